"""`PlannedAndMade`: the page of a plan, with what the compiler made of each row's line."""

from __future__ import annotations

import collections
import dataclasses

from ...policies import CONTRACTIONS
from ..page.page import Page, Paged
from ..report.report import Report
from .against_plan import line_of
from .report import CompiledReport, dtypes_of


@dataclasses.dataclass(frozen=True)
class PlannedAndMade(Paged):
    """A plan, and what a compiler made of it: its page is that of the plan with one column more.

    Args:
        plan: What `explain` returned.
        made: What `explain_compiled` returned for the same program.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, autocast, explain, explain_compiled
        >>> from jmp_autocast.inspect import PlannedAndMade
        >>> fn, x = autocast(lambda x: jnp.tanh(x @ x), policy=BF16), jnp.ones((16, 16))
        >>> both = PlannedAndMade(explain(fn, x), explain_compiled(fn, x))
        >>> both.to_html().splitlines()[0]
        '<!doctype html>'
    """

    plan: Report
    made: CompiledReport

    def __str__(self) -> str:
        """Returns both reports, the compiled program first."""
        return f"{self.made}\n\n{self.plan}"

    def _page(self) -> Page:
        at_line: dict[str, dict[str, None]] = collections.defaultdict(dict)
        for product in self.made.products:
            by = f" by {product.kernel}" if product.kernel else ""
            at_line[line_of(product.source)][dtypes_of(product) + by] = None
        made = [
            ", ".join(at_line.get(line_of(row.source), ())) if row.primitive in CONTRACTIONS else ""
            for row in self.plan.rows
        ]
        page = self.plan._page()
        summary = f"{self.plan.summary}; compiled: {self.made.summary}"
        return page._replace(summary=summary, data={**page.data, "made": made})
