"""`Report`: the rows of a program, their totals, and how they differ under another policy."""

from __future__ import annotations

import collections
import dataclasses
import html
import pathlib
from collections.abc import Sequence
from typing import Any

from ...policies.errors import wrong_type
from ..export import WIDTH, Exported, cut, labeled, saved, scaled, table
from ..page.page import page_text
from .at_risk import AtRisk, risk_lines
from .kept import KeptRow, kept_lines
from .page_rows import page_rows
from .rows import Row, note_on_sizes, reason_of, short_dtypes
from .totals import Share, Totals, by_dtype, guarded


@dataclasses.dataclass(frozen=True)
class Change:
    """One equation that two policies treat differently.

    Args:
        before: The row under the first policy.
        after: The row under the second.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, Policy, explain
        >>> f, x = lambda x: jnp.tanh(x @ x), jnp.ones((8, 8))
        >>> careful = explain(f, x, policy=Policy("bfloat16", level="tensor_cores"))
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


_UNKNOWN = "operands keep their declared dtypes; register_rule gives one"

# The columns of the tables of a page, as the fields stand.
_OF_KEPT = ("dtype", "made by", "scope", "arrays", "bytes")
_OF_RISKS = ("primitive", "dtype", "reason", "because", "equations", "scope", "source")

# A screen of groups. Rows are many more: a program may have 2,000 of them.
_SHOWN = 30


@dataclasses.dataclass(frozen=True)
class Report(Exported):
    """What `jmp_autocast.explain` returns.

    Args:
        name: The function's name.
        compute_dtype: The policy's compute dtype.
        rows: A row per equation, in program order.
        totals: Sums over the rows.
        dtype_reason: Why this compute dtype, where the device chose it; else ``""``.
        kept: What the program keeps for its backward pass, the most bytes first; ``()`` where
            ``totals.residual_nbytes`` is None.
        at_risk: What the program itself declares in 16 bits, and the planner raises to float32;
            ``()`` for an `autocast` wrapper, which raises it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, Policy, explain
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
    kept: tuple[KeptRow, ...] = ()
    at_risk: tuple[AtRisk, ...] = ()

    @property
    def summary(self) -> str:
        """The report in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import BF16, Policy, explain
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
            more = f"{kept[0].reason} keeps {100 * part:.1f} % in float32"
        # Of a program that was lowered before, the rows say to what; to nothing, if to none.
        is_none = self.compute_dtype == "float32"
        dtypes = "less than float32" if is_none else self.compute_dtype
        if totals.float8_contraction_flops:
            dtypes += f", of them {100 * totals.float8_share:.1f} % in float8"
        return cut(f"{self.name}: {share} in {dtypes}; {more}")

    def __str__(self) -> str:
        """Returns the summary, the totals, and the equations grouped by what is alike in them."""
        tables = [*self._table(), *kept_lines(self.kept), *risk_lines(self.at_risk)]
        return "\n".join([self.summary, "", *self._facts(), "", *tables])

    def _facts(self) -> list[str]:
        totals, casts = self.totals, self.totals.casts
        loops, nbytes = totals.loops_of_unknown_length, totals.residual_nbytes
        full, error = scaled(totals.float32_residual_nbytes or 0), totals.residual_error
        residuals = f"{scaled(nbytes or 0)}B kept for the backward pass, of them {full}B"
        residuals += " in float32"
        if nbytes is None:
            residuals = f"not known: {error}" if error else None
        declared = f"{scaled(totals.declared_residual_nbytes or 0)}B of the program in float32"
        kept = guarded(self.rows)
        guards = f"{scaled(totals.guarded_contraction_flops)} FLOPs of matmuls and convolutions"
        part = totals.wide_kernel_flops / max(
            totals.wide_kernel_flops + totals.contraction_flops, 1
        )
        kernels = f"{scaled(totals.wide_kernel_flops)} FLOPs, {100 * part:.0f} % of all products, "
        kernels += "run in float32: in_compute_dtype has one run in 16 bits"
        unknown, unmatched = ", ".join(totals.unknown), ", ".join(totals.unmatched_scopes)
        chosen = f"{self.compute_dtype}, {self.dtype_reason}" if self.dtype_reason else None
        return labeled(
            {
                "dtype": chosen,
                "FLOPs": f"{scaled(totals.flops)}, of them {scaled(totals.contraction_flops)} in "
                "matmuls and convolutions",
                "float32": f"{guards}: {reason_of(kept[0])}" if kept else None,
                "kernels": kernels if totals.wide_kernel_flops else None,
                "sizes": note_on_sizes(self.rows) or None,
                "casts": f"{casts.down} down ({scaled(casts.down_nbytes)}B), "
                f"{casts.up} up ({scaled(casts.up_nbytes)}B)",
                "parameters": f"{totals.parameters} arrays, "
                f"{totals.cast_parameters} 16-bit copies"
                + (f", {totals.quantized_parameters} 8-bit" if totals.quantized_parameters else ""),
                "float8": self._float8(),
                "residuals": residuals,
                "instead of": declared if totals.declared_residual_nbytes is not None else None,
                "loops": f"{loops} while loops, counted as one iteration" if loops else None,
                "unknown": f"no rule for {unknown}: {_UNKNOWN}" if unknown else None,
                "scopes": f"nothing matched {unmatched}" if unmatched else None,
            }
        )

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

    def to_html(self, path: str | pathlib.Path | None = None) -> str:
        """Returns the report as an HTML page, to be opened in any browser.

        It is one file that runs no script and asks nothing of a network. Links lead from each
        equation to those that made its operands, and to the cause of its dtypes.

        Args:
            path: A file to write it to as well.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain
            >>> page = explain(jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8))).to_html()
            >>> page.splitlines()[0]
            '<!doctype html>'
        """
        facts = [(line[:12].rstrip(), line[12:]) for line in self._facts()]
        shares = [(d, scaled(s.flops), f"{scaled(s.nbytes)}B") for d, s in self.by_dtype().items()]
        tables = [
            ("By dtype", ("dtype", "FLOPs", "bytes"), shares),
            ("Kept for the backward pass", _OF_KEPT, _cells(self.kept)),
            ("At risk in 16 bits", _OF_RISKS, _cells(self.at_risk)),
        ]
        return saved(page_text(self.name, self.summary, facts, page_rows(self.rows), tables), path)

    def _repr_html_(self) -> str:
        """Returns the page in a frame, for notebooks: it shares nothing with the notebook."""
        return (
            f'<iframe title="{html.escape(self.name)}" sandbox="" '
            f'style="width:100%;height:760px;border:0" srcdoc="{html.escape(self.to_html())}">'
            "</iframe>"
        )

    def by_dtype(self) -> dict[str, Share]:
        """Returns the FLOPs and bytes of each dtype, the most bytes first.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import BF16, Policy, explain
            >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            >>> explain(lambda w, x: jnp.exp(x @ w), x, x, policy=BF16).by_dtype()
            {'float32': Share(flops=64, nbytes=512), 'bfloat16': Share(flops=1024, nbytes=384)}
        """
        return by_dtype(self.rows)

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
        if not isinstance(other, Report):
            fix = "Make one with explain(fn, *args, policy=other_policy)."
            raise wrong_type("Report.diff takes a Report", other, fix)
        if _program(self.rows) != _program(other.rows):
            raise ValueError(
                "Report.diff compares policies on one program, but "
                f"{self.name} and {other.name} are different programs. "
                "Explain the same function on arguments of the same shapes."
            )
        pairs = zip(self.rows, other.rows, strict=True)
        return [
            Change(a, b) for a, b in pairs if (a.operands, a.results) != (b.operands, b.results)
        ]


def _cells(rows: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns the values of the fields of each row."""
    return [tuple(getattr(row, field.name) for field in dataclasses.fields(row)) for row in rows]


def _program(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    # Of dtypes only those that the program declares: the others are what policies change.
    return [(r.primitive, r.depth, r.operand_shapes, r.declared_operands) for r in rows]
