"""`explain_kept`: what a function keeps for its backward pass, why, and what it computes again."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ...autocast import Autocast, PlannedCall
from ...call import arguments
from ...call.arguments import check_function, name_of
from ...interpreters import Source
from ...interpreters.compat import fresh_make_jaxpr, jaxpr_as_fun
from ...interpreters.keep.account import (
    CutJaxpr,
    Island,
    KeptArray,
    cut_jaxprs,
    islands,
    kept_arrays,
)
from ...interpreters.keep.choice import ResidualChoice
from ...interpreters.keep.emit import Emitter
from ...keep_less import KeepLess, keep_less
from ..export import cut, labeled, scaled, table
from ..page.page import Page, Paged, section, tables_page
from .kept_bytes import KeptBytes, kept_bytes

# Half a screen of groups each; `arrays` and `islands` hold all.
_SHOWN = 16

# More bars than a reader looks at; JSON has all.
_BARS, _PICTURES = 400, 6


@dataclasses.dataclass(frozen=True)
class KeptReport(Paged):
    """What `jmp_autocast.inspect.explain_kept` returns.

    Args:
        name: The function's name.
        residuals: What was asked for: a word, or a share.
        declared_nbytes: The bytes that `jax.vjp` of the function keeps without a plan, as
            ``residual_nbytes`` in `Totals` counts them; None where JAX cannot differentiate it.
        nbytes: The bytes that it keeps with the plan, counted alike.
        arrays: The arrays that the planned jaxprs keep, the largest first. What is not planned, as
            with ``"auto"`` what stands in no loop, is in the totals alone.
        islands: What is computed again, in program order.
        cuts: The planned jaxprs, value by value, that which keeps the most first.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import keep_less
        >>> from jmp_autocast.inspect import explain_kept
        >>> @keep_less
        ... def loss(params, x):
        ...     layer = lambda x, w: (jax.nn.gelu(x @ w), None)
        ...     return jax.lax.scan(layer, x, params["w"])[0].sum()
        >>> report = explain_kept(loss, {"w": jnp.ones((3, 8, 8))}, jnp.ones((4, 8)))
        >>> [(array.shape, array.times, array.primitive) for array in report.arrays]
        [((4, 8), 3, ''), ((4, 8), 3, 'dot_general')]
    """

    _computed: ClassVar[tuple[str, ...]] = ("share",)

    name: str
    residuals: str | float
    declared_nbytes: int | None
    nbytes: int | None
    arrays: tuple[KeptArray, ...]
    islands: tuple[Island, ...]
    cuts: tuple[CutJaxpr, ...]

    @property
    def share(self) -> float:
        """The bytes that are kept, as a share of those that are kept without a plan.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast.inspect import explain_kept
            >>> explain_kept(jnp.sin, jnp.ones(4)).share  # without a loop nothing changes
            1.0
        """
        return (self.nbytes or 0) / self.declared_nbytes if self.declared_nbytes else 1.0

    @property
    def summary(self) -> str:
        """The report in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast.inspect import explain_kept
            >>> explain_kept(jnp.sin, jnp.ones(4)).summary
            "sin: 16 B kept for the backward pass, 16 B without residuals='auto'"
        """
        if self.nbytes is None or self.declared_nbytes is None:
            return f"{self.name}: JAX cannot differentiate it"
        line = f"{self.name}: {scaled(self.nbytes)}B kept for the backward pass"
        if self.residuals == "declared":
            return line
        return f"{line}, {scaled(self.declared_nbytes)}B without residuals={self.residuals!r}"

    def _page(self) -> Page:
        """Returns the page: a picture of each cut, and tables of the arrays and the islands."""
        of_arrays = "bytes, dtype, shape, times, made by, read by, because, scope, source"
        of_islands = "bytes, FLOPs, times, computed again, scope"
        sections = [
            section("Arrays that are kept, the largest first", of_arrays, self.arrays),
            section("Computed again, in program order", of_islands, self.islands),
        ]
        some = [each for each in self.cuts[:_PICTURES] if each.values]
        cuts = [(each.scope, each.times, len(each.values), each.values[:_BARS]) for each in some]
        return tables_page("Kept for the backward pass", self.name, self.summary, sections, cuts)

    def __str__(self) -> str:
        """Returns the summary, the arrays and the islands, those that are alike together."""
        return "\n".join([cut(self.summary), "", *self.tables()])

    def tables(self) -> list[str]:
        """Returns the lines of two tables: what is kept and why, and what is computed again.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast.inspect import explain_kept
            >>> explain_kept(jnp.sin, jnp.ones(4)).tables()
            ['again       nothing is computed again']
        """
        if not self.arrays and not self.islands:
            return labeled({"again": "nothing is computed again"})
        kept: dict[Any, list[KeptArray]] = collections.defaultdict(list)
        for a in self.arrays:
            what = f"{a.dtype} {list(a.shape)}"
            kept[what, a.primitive or "input", ", ".join(a.readers), a.reason].append(a)
        columns = {"bytes": ">7", "kept": "23", "made by": "14", "read by": "15", "because": ""}
        by_size = sorted(kept.items(), key=lambda item: -_nbytes(item[1]))
        lines = table(
            columns,
            by_size,
            lambda item: [scaled(_nbytes(item[1])), *item[0]],
            _SHOWN,
            "more; KeptReport.arrays has all",
        )
        again: dict[Any, list[Island]] = collections.defaultdict(list)
        for island in self.islands:
            again[island.recomputed].append(island)
        columns = {"bytes": ">7", "FLOPs": ">7", "computed again, and not kept": ""}
        by_size = sorted(again.items(), key=lambda item: -_nbytes(item[1]))

        def cells(item: tuple[Sequence[str], list[Island]]) -> list[Any]:
            names, found = item
            counts = collections.Counter(names)
            text = ", ".join(f"{n} {k}" if n > 1 else k for k, n in counts.items())
            return [scaled(_nbytes(found)), scaled(sum(i.flops for i in found)), text]

        more = "more; KeptReport.islands has all"
        return [*lines, "", *table(columns, by_size, cells, _SHOWN, more)]


def _nbytes(items: Sequence[KeptArray] | Sequence[Island]) -> int:
    return sum(item.nbytes for item in items)


def explain_kept(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> KeptReport:
    """Reports what a function keeps for its backward pass, and what is computed again instead.

    It computes nothing and accepts ``jax.ShapeDtypeStruct`` in place of any array. A symbolic
    length counts as 128. The counts are those of jaxprs; XLA may merge equal arrays, and
    compute cheap ones again by itself.

    Args:
        fn: A `keep_less` or `autocast` wrapper, whose options then apply; any other function is
            treated as `keep_less` treats it by default. Pass the loss, not its gradient.
        *args: Its positional arguments, as arrays or ``jax.ShapeDtypeStruct``.
        **kwargs: Its keyword arguments.

    Returns:
        The report, for ``print(report)``, ``report.arrays`` and ``report.islands``.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: ``fn`` is an `autocast` wrapper that is not enabled.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, autocast
        >>> from jmp_autocast.inspect import explain_kept
        >>> def loss(params, x):
        ...     layer = lambda x, w: (jax.nn.gelu(x @ w), None)
        ...     return jax.lax.scan(layer, x, params["w"])[0].sum()
        >>> mixed = autocast(loss, policy=BF16, residuals="auto")
        >>> report = explain_kept(mixed, {"w": jnp.ones((3, 8, 8))}, jnp.ones((4, 8)))
        >>> report.islands[0].recomputed.count("tanh"), report.share < 0.5
        (1, True)
    """
    check_function(fn, "explain_kept", "Pass the function itself, then its arguments.")
    if isinstance(fn, Autocast):
        return kept_of(fn.planned(*args, **kwargs), name_of(fn))
    wrapper: Any = fn if isinstance(fn, KeepLess) else keep_less(fn)
    call, closed = wrapper.traced(args, kwargs, abstract=True)
    return _report(name_of(fn), closed, call, wrapper.choice)


def kept_of(planned: PlannedCall, name: str) -> KeptReport:
    """Returns the report of a call of a wrapper of `autocast`.

    Args:
        planned: The planned call.
        name: The function's name.
    """
    closed = fresh_make_jaxpr(planned.declared, *planned.call.shapes)
    return _report(name, closed, planned.call, planned.residuals)


def _report(name: str, closed: Any, call: arguments.Call, choice: ResidualChoice) -> KeptReport:
    shapes, is_param = call.shapes, [source is Source.PARAM for source in call.sources]
    emitter = Emitter(choice)

    def keeps(program: Callable[..., Any]) -> KeptBytes:
        return kept_bytes(program, shapes, [i for i, param in enumerate(is_param) if param])

    declared = kept = keeps(jaxpr_as_fun(closed))
    if not choice.is_off:
        after = fresh_make_jaxpr(lambda *xs: emitter.run(closed, xs, is_param), *shapes)
        kept = keeps(jaxpr_as_fun(after))
    return KeptReport(
        name,
        choice.residuals,
        declared.nbytes,
        kept.nbytes,
        tuple(kept_arrays(emitter.planned)),
        tuple(islands(emitter.planned)),
        tuple(cut_jaxprs(emitter.planned)),
    )
