"""`Report`: a row for each equation of a program, and totals."""

from __future__ import annotations

import collections
import dataclasses
import html
import pathlib
from collections.abc import Sequence
from typing import Any

from ..export import Exported, cut, labeled, saved, scaled, table
from ..page.page import Table, page_text
from .at_risk import AtRisk
from .kept import KeptRow
from .rows import Row, note_on_sizes, reason_of, short_dtypes
from .totals import Share, Totals, by_dtype, guarded

_UNKNOWN = "operands keep their declared dtypes; register_rule gives one"


@dataclasses.dataclass(frozen=True)
class Report(Exported):
    """The result of `jmp_autocast.explain`.

    Args:
        name: The function's name.
        compute_dtype: The policy's compute dtype.
        rows: A row per equation, in program order.
        totals: Sums over the rows.
        dtype_reason: Why the compute dtype was chosen, if the device decided it; else ``""``.
        kept: The residuals of the program, the most bytes first; ``()`` if
            ``totals.residual_nbytes`` is None.
        at_risk: The equations that lose precision in 16 bits: those that a program without
            `autocast` declares in 16 bits, and `autocast` would raise to float32; and those that
            lose precision with `autocast`, too.

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
        # If a program contains autocast, its compute dtype comes from the rows: float32 if no row
        # is in 16 bits.
        is_none = self.compute_dtype == "float32"
        dtypes = "less than float32" if is_none else self.compute_dtype
        if totals.float8_contraction_flops:
            dtypes += f", of them {100 * totals.float8_share:.1f} % in float8"
        return cut(f"{self.name}: {share} in {dtypes}; {more}")

    def __str__(self) -> str:
        """Returns the summary, the totals, and tables of equations, residuals and risks."""
        lines = [self.summary, "", *self._facts(), "", *self._table()]
        if self.kept:
            columns = {"bytes": ">7", "arrays": ">7", "dtype": "10", "kept, made by": "24"}
            more = "more; report.kept has all"
            lines += ["", *table({**columns, "scope": ""}, self.kept, _kept_cells, 16, more)]
        if self.at_risk:
            columns = {"at risk": ">7", "primitive": "20", "dtype": "9", "scope": "24"}
            more = "more; report.at_risk has all"
            lines += ["", *table({**columns, "because": ""}, self.at_risk, _risk_cells, 20, more)]
            # Source lines have whole paths, which terminals turn into links.
            lines += [cut(f"  at {risk.source}") for risk in self.at_risk[:20]]
        return "\n".join(lines)

    def _facts(self) -> list[str]:
        totals, casts, facts = self.totals, self.totals.casts, dict[str, str | None]()
        if self.dtype_reason:
            facts["dtype"] = f"{self.compute_dtype}, {self.dtype_reason}"
        products = f"{scaled(totals.contraction_flops)} in matmuls and convolutions"
        facts["FLOPs"] = f"{scaled(totals.flops)}, of them {products}"
        if kept := guarded(self.rows):
            flops = scaled(totals.guarded_contraction_flops)
            facts["float32"] = f"{flops} FLOPs of matmuls and convolutions: {reason_of(kept[0])}"
        if flops := totals.wide_kernel_flops:
            facts["kernels"] = (
                f"{scaled(flops)} FLOPs, {100 * flops / (flops + totals.contraction_flops):.0f} % "
                "of all products, run in float32: in_compute_dtype has one run in 16 bits"
            )
        facts["sizes"] = note_on_sizes(self.rows) or None
        facts["casts"] = (
            f"{casts.down} down ({scaled(casts.down_nbytes)}B), "
            f"{casts.up} up ({scaled(casts.up_nbytes)}B)"
        )
        quantized = f", {totals.quantized_parameters} 8-bit" if totals.quantized_parameters else ""
        copies = f"{totals.cast_parameters} 16-bit copies{quantized}"
        facts["parameters"] = f"{totals.parameters} arrays, {copies}"
        facts["float8"] = self._float8()
        if totals.residual_nbytes is not None:
            full = f"{scaled(totals.float32_residual_nbytes or 0)}B in float32"
            nbytes = scaled(totals.residual_nbytes)
            facts["residuals"] = f"{nbytes}B kept for the backward pass, of them {full}"
        elif totals.residual_error:
            facts["residuals"] = f"not known: {totals.residual_error}"
        if (nbytes := totals.declared_residual_nbytes) is not None:
            facts["instead of"] = f"{scaled(nbytes)}B of the program in float32"
        if loops := totals.loops_of_unknown_length:
            facts["loops"] = f"{loops} while loops, counted as one iteration"
        if totals.unknown:
            facts["unknown"] = f"no rule for {', '.join(totals.unknown)}: {_UNKNOWN}"
        if totals.unmatched_scopes:
            facts["scopes"] = f"nothing matched {', '.join(totals.unmatched_scopes)}"
        return labeled(facts)

    def _float8(self) -> str | None:
        """Returns the number of products in float8, and why other requests for float8 failed."""
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
        # The group with the most FLOPs is first.
        ordered = sorted(groups.values(), key=lambda rows: -sum(row.flops for row in rows))

        def cells(rows: list[Row]) -> list[Any]:
            times, flops = sum(row.times for row in rows), sum(row.flops for row in rows)
            # If the rows of a group have different causes, such as names of operands, only the code
            # is shown.
            one_cause = len({row.cause for row in rows}) == 1
            reason = reason_of(rows[0]) if one_cause else rows[0].reason
            return [times, rows[0].primitive, short_dtypes(rows[0]), scaled(flops), reason]

        columns = {"times": ">7", "primitive": "22", "dtypes": "26", "FLOPs": ">7", "reason": ""}
        return table(columns, ordered, cells, 30, "more groups; report.rows holds all rows")

    def to_html(self, path: str | pathlib.Path | None = None) -> str:
        """Returns the report as an HTML page for any browser.

        It is one file that runs no script and loads nothing from a network. Each equation has links
        to the producers of its operands, and to the cause of its dtypes.

        Args:
            path: A file to write the page to as well.

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
            _fields("Kept for the backward pass", KeptRow, self.kept),
            _fields("At risk in 16 bits", AtRisk, self.at_risk),
        ]
        return saved(page_text(self.name, self.summary, facts, self.rows, tables), path)

    def _repr_html_(self) -> str:
        """Returns the HTML page in a frame that is isolated from the notebook."""
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


def _kept_cells(row: KeptRow) -> list[Any]:
    return [scaled(row.nbytes), row.arrays, row.dtype, row.primitive or "a loop", row.scope]


def _risk_cells(risk: AtRisk) -> list[Any]:
    return [risk.equations, risk.primitive, risk.dtype, risk.scope, risk.because]


def _fields(title: str, kind: type[Any], rows: Sequence[Any]) -> Table:
    """Returns a table for the HTML page, with a column for each field of a dataclass."""
    names = [field.name for field in dataclasses.fields(kind)]
    return title, names, [[getattr(row, name) for name in names] for row in rows]
