"""`Report`: the rows of a program, their totals, and how they differ under another policy."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...policies.errors import wrong_type
from ..export import WIDTH, counted, cut, labeled, scaled, table
from ..page.page import Page, Paged, section, tables_page
from .device_table import device_lines, device_sections
from .kept import KeptReport
from .page_rows import data_of
from .roofline import DeviceTime, Roofline
from .rows import Row, note_on_sizes, reason_of, short_dtypes
from .totals import Share, Totals, by_dtype, guarded, item_size
from .wire import Wire

# A screen of changes. A program of 48 layers may have thousands.
_CHANGES = 40


@dataclasses.dataclass(frozen=True)
class Change:
    """One equation that two policies treat differently.

    Args:
        before: The row under the first policy.
        after: The row under the second.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain, keep_less
        >>> f, x = lambda x: jnp.tanh(x @ x), jnp.ones((8, 8))
        >>> careful = explain(f, x, policy=BF16.with_level("tensor_cores"))
        >>> (change,) = explain(f, x, policy=BF16).diff(careful)
        >>> change.before.reason, change.after.results
        ('PROMOTE_LOW', ('float32',))
    """

    before: Row
    after: Row

    def __str__(self) -> str:
        """Returns the change in two lines."""
        where = (
            f"{self.before.primitive} in {self.before.scope or 'no scope'} ({self.before.source})"
        )
        was, now = (f"{short_dtypes(row)} {reason_of(row)}" for row in (self.before, self.after))
        return f"{cut(where)}\n    {cut(f'{was}  =>  {now}', WIDTH - 4)}"


@dataclasses.dataclass(frozen=True)
class Difference(Paged):
    """What ``report.difference(other)`` returns.

    Args:
        name: The function's name.
        equations: The number of equations.
        totals: What the program costs, before and after, by what it is: FLOPs and bytes of each
            dtype, casts, bytes kept for the backward pass. None where it is not known.
        changes: The equations whose dtypes differ, in program order.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> f, x = lambda x: jnp.tanh(x @ x), jnp.ones((8, 8))
        >>> careful = explain(f, x, policy=BF16.with_level("tensor_cores"))
        >>> explain(f, x, policy=BF16).difference(careful).totals["FLOPs in bfloat16"]
        (1088, 1024)
    """

    _computed: ClassVar[tuple[str, ...]] = ("summary",)

    name: str
    equations: int
    totals: Mapping[str, tuple[int | None, int | None]]
    changes: tuple[Change, ...]

    @property
    def summary(self) -> str:
        """The difference in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain
            >>> report = explain(jnp.tanh, jnp.ones(4), policy=BF16)
            >>> report.difference(report).summary
            'tanh: 0 of 1 equation differ'
        """
        count = counted(self.equations, "equation")
        return cut(f"{self.name}: {len(self.changes)} of {count} differ")

    def __str__(self) -> str:
        """Returns the summary, a table of totals, and one of the equations that differ."""
        columns = {"before": ">9", "after": ">9", "total": ""}
        total = lambda item: [*map(_number, item[1]), item[0]]  # noqa: E731
        lines = table(columns, list(self.totals.items()), total)
        changed = {"primitive": "16", "before": "16", "after": "16", "scope": "18", "because": ""}
        if self.changes:
            lines += ["", *table(changed, self.changes, _cells, _CHANGES, "more in .changes")]
        return "\n".join([self.summary, "", *lines])

    def _page(self) -> Page:
        """Returns the page: the two tables, with all changes."""
        columns = "primitive, before, after, scope, because, because now, source"
        rows = [
            (*_cells(each)[:-1], reason_of(each.before), reason_of(each.after), each.before.source)
            for each in self.changes
        ]
        totals = [(name, *map(_number, pair)) for name, pair in self.totals.items()]
        sections = [
            section("What the program costs", "total, before, after", totals),
            section("Equations whose dtypes differ", columns, rows),
        ]
        return tables_page("Two policies", self.name, self.summary, sections)


# A screen of groups. Rows are many more: a program may have 2,000 of them.
_SHOWN = 30


@dataclasses.dataclass(frozen=True)
class Report(Paged):
    """What `jmp_autocast.explain` returns.

    Args:
        name: The function's name.
        compute_dtype: The policy's compute dtype.
        rows: A row per equation, in program order.
        totals: Sums over the rows.
        dtype_reason: Why this compute dtype, where the device chose it; else ``""``.
        kept: What is kept for the backward pass with `keep_less`, and what it would be without;
            None where the function was not given to it.
        roofline: Whether 16 bits make its matmuls and convolutions faster on the device that it is
            explained for.
        wide_dtype: The dtype of what is not lowered, float32 or float64.
        wire: The collectives of the program itself, those of the most bytes first.
        wide_gradient_nbytes: The bytes of gradients of weights that devices add up in float32,
            because products hand them out so: ``weight_gradients="compute"`` halves them. 0 on one
            device, and in `shard_map`, where the program itself adds them.
        devices: What the products take at best on each device that was asked for; on all that are
            known where none was. Empty without a matmul or convolution, in float64, and where a
            length is symbolic.
        asked: Whether a device was asked for: then the text shows them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> report = explain(lambda w, x: jnp.exp(x @ w), x, x, policy=BF16)
        >>> [(row.primitive, row.results, row.reason) for row in report.rows]
        [('dot_general', ('bfloat16',), 'LOWER_PRECISION'), ('exp', ('float32',), 'FP32')]
    """

    name: str
    compute_dtype: str
    rows: tuple[Row, ...]
    totals: Totals
    dtype_reason: str = ""
    kept: KeptReport | None = None
    roofline: Roofline | None = None
    wide_dtype: str = "float32"
    wire: tuple[Wire, ...] = ()
    wide_gradient_nbytes: int = 0
    devices: tuple[DeviceTime, ...] = ()
    asked: bool = False

    @property
    def summary(self) -> str:
        """The report in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain
            >>> def layer(w, x):
            ...     return jnp.exp(x @ w)
            >>> explain(layer, jnp.ones((8, 8)), jnp.ones((8, 8)), policy=BF16).summary
            'layer: 100.0 % of matmul and convolution FLOPs in bfloat16; 2 equations, 3 casts'
        """
        totals = self.totals
        share = f"{100 * totals.low_share:.1f} % of matmul and convolution FLOPs"
        if not totals.contraction_flops:
            share = "no matmul or convolution"
        casts = totals.casts.down + totals.casts.up
        more = f"{totals.equations} equations, {casts} casts"
        if kept := guarded(self.rows):
            part = totals.guarded_contraction_flops / max(totals.contraction_flops, 1)
            more = f"{kept[0].reason} keeps {100 * part:.1f} % in {self.wide_dtype}"
        # Of a program that was lowered before, the rows say to what; to nothing, if to none.
        is_none = self.compute_dtype == self.wide_dtype
        dtypes = f"less than {self.wide_dtype}" if is_none else self.compute_dtype
        if totals.float8_contraction_flops:
            dtypes += f", of them {100 * totals.float8_share:.1f} % in float8"
        return cut(f"{self.name}: {share} in {dtypes}; {more}")

    def __str__(self) -> str:
        """Returns the summary, the totals, and the equations grouped by what is alike in them."""
        kept = ["", *self.kept.tables()] if self.kept else []
        devices = device_lines(self.devices, self.roofline) if self.asked else []
        lines = [self.summary, "", *self._facts(), "", *devices, *self._table(), *kept]
        return "\n".join(lines)

    def _facts(self) -> list[str]:
        totals, casts = self.totals, self.totals.casts
        loops, nbytes = totals.loops_of_unknown_length, totals.residual_nbytes
        full, error = scaled(totals.float32_residual_nbytes or 0), totals.residual_error
        residuals = f"{scaled(nbytes or 0)}B kept for the backward pass, of them {full}B"
        residuals += f" in {self.wide_dtype}"
        if nbytes is None:
            residuals = f"not known: {error}" if error else None
        kept, bits = guarded(self.rows), 8 * item_size(self.wide_dtype) // 2
        guards = f"{scaled(totals.guarded_contraction_flops)} FLOPs of matmuls and convolutions"
        part = totals.wide_kernel_flops / max(
            totals.wide_kernel_flops + totals.contraction_flops, 1
        )
        kernels = f"{scaled(totals.wide_kernel_flops)} FLOPs, {100 * part:.0f} % of all products, "
        kernels += f"run in {self.wide_dtype}: with_kernels names what runs in 16 bits"
        unknown, unmatched = ", ".join(totals.unknown), ", ".join(totals.unmatched_scopes)
        chosen = f"{self.compute_dtype}, {self.dtype_reason}" if self.dtype_reason else None
        return labeled(
            {
                "dtype": chosen,
                "FLOPs": f"{scaled(totals.flops)}, of them {scaled(totals.contraction_flops)} in "
                "matmuls and convolutions",
                self.wide_dtype: f"{guards}: {reason_of(kept[0])}" if kept else None,
                "kernels": kernels if totals.wide_kernel_flops else None,
                "sizes": note_on_sizes(self.rows) or None,
                "roofline": self.roofline and self.roofline.says,
                "casts": f"{casts.down} down ({scaled(casts.down_nbytes)}B), "
                f"{casts.up} up ({scaled(casts.up_nbytes)}B)",
                "parameters": f"{totals.parameters} arrays, "
                f"{totals.cast_parameters} {bits}-bit copies"
                + (f", {totals.quantized_parameters} 8-bit" if totals.quantized_parameters else ""),
                "float8": self._float8(),
                "residuals": residuals,
                "instead of": self._instead(),
                "wire": self._wire(),
                "gradients": self._gradients(),
                "loops": f"{loops} while loops, counted as one iteration" if loops else None,
                "unknown": f"no rule for {unknown}: kept as declared" if unknown else None,
                "scopes": f"nothing matched {unmatched}" if unmatched else None,
            }
        )

    def _instead(self) -> str | None:
        """Returns what would be kept in float32, and without the option that keeps less."""
        declared, kept = self.totals.declared_residual_nbytes, self.kept
        parts = []
        if declared is not None:
            parts = [f"{scaled(declared)}B of the program in {self.wide_dtype}"]
        if kept:
            parts.append(f"{scaled(kept.declared_nbytes or 0)}B without {kept.residuals=}")
        return ", ".join(parts).replace("kept.residuals", "residuals") or None

    def _wire(self) -> str | None:
        """Returns what each device sends, by collective and dtype."""
        parts = [
            f"{scaled(wire.nbytes)}B by {wire.collective} in {wire.dtype}"
            + (f" over {wire.devices}" if wire.devices else "")
            for wire in self.wire
        ]
        return ", ".join(parts) or None

    def _gradients(self) -> str | None:
        """Returns what devices add up in float32, and the option that sends less."""
        sent = self.wide_gradient_nbytes
        less = f"weight_gradients='compute' sends {scaled(sent // 2)}B less"
        return f"{scaled(sent)}B added up in {self.wide_dtype}: {less}" if sent else None

    def _float8(self) -> str | None:
        """Returns how many products run in 8 bits, and what keeps the others from it."""
        counts = collections.Counter(row.reason for row in self.rows)
        if not counts["FLOAT8"] and not counts["NOT_FLOAT8"]:
            return None
        others = collections.Counter(row.cause for row in self.rows if row.reason == "NOT_FLOAT8")
        causes = [f"{count} not: {cause}" for cause, count in others.most_common()]
        return "; ".join([f"{counts['FLOAT8']} products in 8 bits", *causes])

    def _table(self) -> list[str]:
        groups: dict[tuple[str, str, str], list[Row]] = collections.defaultdict(list)
        for row in self.rows:
            groups[row.primitive, short_dtypes(row), row.reason].append(row)
        # By FLOPs, so that what costs most is seen without scrolling.
        ordered = sorted(groups.values(), key=lambda rows: -sum(row.flops for row in rows))

        def cells(rows: list[Row]) -> list[Any]:
            times, flops = sum(row.times for row in rows), sum(row.flops for row in rows)
            # Many groups have a cause per row, such as the name of an operand. Then the code says
            # it.
            one_cause = len({row.cause for row in rows}) == 1
            reason = reason_of(rows[0]) if one_cause else rows[0].reason
            return [times, rows[0].primitive, short_dtypes(rows[0]), scaled(flops), reason]

        columns = {"times": ">7", "primitive": "22", "dtypes": "26", "FLOPs": ">7", "reason": ""}
        more = "more groups; report.rows holds all rows"
        return table(columns, ordered, cells, _SHOWN, more)

    def _page(self) -> Page:
        """Returns the page: totals, modules, the chart and all rows; a row leads to its cause."""
        sizes = note_on_sizes(self.rows)
        summary = "; ".join(filter(None, [self.summary, sizes]))
        data = {
            "compute_dtype": self.compute_dtype,
            "wide_dtype": self.wide_dtype,
            "totals": self.totals,
            "roofline": self.roofline,
            "sections": device_sections(self.devices, self.wire),
            **data_of(self.rows),
        }
        return Page("rows", "Precision report", self.name, summary, data)

    def by_dtype(self) -> dict[str, Share]:
        """Returns the FLOPs and bytes of each dtype, the most bytes first.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain
            >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            >>> explain(lambda w, x: jnp.exp(x @ w), x, x, policy=BF16).by_dtype()
            {'float32': Share(flops=64, nbytes=512), 'bfloat16': Share(flops=1024, nbytes=384)}
        """
        return by_dtype(self.rows)

    def to_pandas(self) -> Any:
        """Returns the rows as a ``pandas.DataFrame``.

        Raises:
            ImportError: pandas is not installed.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain
            >>> frame = explain(jnp.exp, jnp.ones(4), policy=BF16).to_pandas()
            >>> frame["reason"].tolist()
            ['FP32']
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "Report.to_pandas needs pandas: pip install pandas. Report.rows and "
                "Report.to_json hold the same without it."
            ) from error
        return pandas.DataFrame([dataclasses.asdict(row) for row in self.rows])

    def diff(self, other: Report) -> list[Change]:
        """Returns the equations whose dtypes another policy changes.

        Args:
            other: The report of the same function and arguments under another policy.

        Raises:
            TypeError: ``other`` is no report.
            ValueError: The reports are of different programs.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import BF16, CastPolicy, explain
            >>> f, x = lambda x: jnp.tanh(x @ x), jnp.ones((8, 8))
            >>> pinned = BF16.with_rules({"tanh": CastPolicy.FP32})
            >>> changes = explain(f, x, policy=BF16).diff(explain(f, x, policy=pinned))
            >>> [(c.before.primitive, c.before.operands, c.after.operands) for c in changes]
            [('tanh', ('bfloat16',), ('float32',))]
        """
        return list(self._beside(other, "diff").changes)

    def difference(self, other: Report) -> Difference:
        """Returns this report beside that of another policy: totals, and what differs.

        Args:
            other: As for `diff`.

        Raises:
            TypeError: As for `diff`.
            ValueError: As for `diff`.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import BF16, explain
            >>> f, x = lambda x: jnp.tanh(x @ x), jnp.ones((8, 8))
            >>> careful = explain(f, x, policy=BF16.with_level("tensor_cores"))
            >>> explain(f, x, policy=BF16).difference(careful).summary
            '<lambda>: 1 of 2 equations differ'
        """
        return self._beside(other, "difference")

    def _beside(self, other: Any, by: str) -> Difference:
        if not isinstance(other, Report):
            fix = "Make one with explain(fn, *args, policy=other_policy)."
            raise wrong_type(f"Report.{by} takes a Report", other, fix)
        if _program(self.rows) != _program(other.rows):
            raise ValueError(
                f"Report.{by} compares policies on one program, but {self.name} and {other.name} "
                "are different programs. Explain the same function on arguments of the same shapes."
            )
        pairs = zip(self.rows, other.rows, strict=True)
        changes = [
            Change(a, b) for a, b in pairs if (a.operands, a.results) != (b.operands, b.results)
        ]
        return Difference(self.name, len(self.rows), _totals(self, other), tuple(changes))


def _number(value: int | None) -> str:
    return "not known" if value is None else scaled(value).rstrip()


def _cells(change: Change) -> list[Any]:
    before, after = change.before, change.after
    dtypes = [short_dtypes(row) for row in (before, after)]
    return [before.primitive, *dtypes, before.scope, reason_of(after)]


def _totals(before: Report, after: Report) -> dict[str, tuple[int | None, int | None]]:
    shares = by_dtype(before.rows), by_dtype(after.rows)
    names = list(dict.fromkeys([*shares[0], *shares[1]]))
    found: dict[str, tuple[int | None, int | None]] = {}
    for field, title in (("flops", "FLOPs"), ("nbytes", "bytes")):
        for name in names:
            of_dtype = [getattr(share[name], field) if name in share else 0 for share in shares]
            if any(of_dtype):
                found[f"{title} in {name}"] = (of_dtype[0], of_dtype[1])
    totals = before.totals, after.totals
    casts = [(x.casts.down + x.casts.up, x.casts.down_nbytes + x.casts.up_nbytes) for x in totals]
    found["casts"], found["bytes of casts"] = zip(*casts, strict=True)
    found["16-bit copies of parameters"] = (totals[0].cast_parameters, totals[1].cast_parameters)
    kept = [x.residual_nbytes for x in totals]
    found["bytes kept for the backward pass"] = (kept[0], kept[1])
    return found


def _program(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    # Of dtypes only those that the program declares: the others are what policies change.
    return [(r.primitive, r.depth, r.operand_shapes, r.declared_operands) for r in rows]
