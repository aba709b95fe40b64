"""`explain_kept`: what a function keeps for its backward pass, why, and what it computes again."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence, Set
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...autocast import Autocast, PlannedCall
from ...call import arguments
from ...call.arguments import check_function, name_of
from ...interpreters import Source
from ...interpreters.after.provenance import entering, follow, leaving
from ...interpreters.compat import (
    AnyJaxpr,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    body_of,
    fresh_make_jaxpr,
    jaxpr_as_fun,
    name_stack,
    without_dead_equations,
)
from ...interpreters.keep.account import (
    CutJaxpr,
    CutValue,
    Island,
    KeptArray,
    cut_jaxprs,
    islands,
    kept_arrays,
)
from ...interpreters.keep.choice import ResidualChoice
from ...interpreters.keep.emit import Emitter, has_loop
from ...interpreters.plan.float_dtypes import is_in
from ...interpreters.primitives.evaluate import of_positions
from ...interpreters.primitives.structure import bodies, equations_in, runs_again
from ...interpreters.primitives.traits import having
from ...keep_less import KeepLess, keep_less
from ...policies import FLOAT32, narrow_dtypes
from ...policies.errors import with_usage
from ..export import cut, labeled, scaled, table
from ..page.page import Page, Paged, section, tables_page
from .jaxprs import nbytes_of
from .products import alike

# Half a screen of groups each; `arrays` and `islands` hold all.
_SHOWN = 16

# More bars than a reader looks at; JSON has all.
_BARS, _PICTURES, _SCOPES = 400, 6, 40

_OF_SCOPES = "scope, bytes kept, bytes computed again"


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
        because: Why nothing is computed again, in a sentence; "" where something is.

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
    because: str = ""

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
        by_scope = self.by_scope()
        rows = [(scope or "no scope", *nbytes) for scope, nbytes in by_scope.items()]
        sections.insert(0, section("By scope, the most bytes first", _OF_SCOPES, rows))
        some = [each for each in self.cuts[:_PICTURES] if each.values]
        cuts = [(each.scope, each.times, len(each.values), _largest(each)) for each in some]
        page = tables_page("Kept for the backward pass", self.name, self.summary, sections, cuts)
        return page._replace(data={**page.data, "scopes": rows[:_SCOPES]})

    def by_scope(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes that are kept and those that are computed again, by scope.

        Scopes that differ by a number alone, as those of layers, are one. Those of the most bytes
        are the first.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast.inspect import explain_kept
            >>> def loss(params, x):
            ...     layer = lambda x, w: (jax.nn.silu(x @ w), None)
            ...     with jax.named_scope("layers"):
            ...         return jax.lax.scan(layer, x, params["w"])[0].sum()
            >>> explain_kept(loss, {"w": jnp.ones((3, 8, 8))}, jnp.ones((4, 8))).by_scope()
            {'layers': (768, 384)}
        """
        found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
        for k, items in enumerate((self.arrays, self.islands)):
            for item in items:
                found[alike(item.scope)][k] += item.nbytes
        by_bytes = sorted(found.items(), key=lambda pair: -sum(pair[1]))
        return {scope: (kept, again) for scope, (kept, again) in by_bytes}

    def __str__(self) -> str:
        """Returns the summary, the arrays and the islands, those that are alike together."""
        return "\n".join([cut(self.summary), "", *self.tables()])

    def tables(self) -> list[str]:
        """Returns the lines of two tables: what is kept and why, and what is computed again.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast.inspect import explain_kept
            >>> report = explain_kept(jnp.sin, jnp.ones(4))
            >>> report.tables()[0], report.because[:23]
            ('again       nothing is computed again', "'auto' plans loops only")
        """
        because = self.because or None
        nothing = labeled({"again": "nothing is computed again", "because": because})
        if not self.arrays and not self.islands:
            return nothing

        def of_array(a: KeptArray) -> Any:
            what = f"{a.dtype} {list(a.shape)}"
            return what, a.primitive or "input", ", ".join(a.readers), a.reason

        def again(item: tuple[Sequence[str], Sequence[Island]]) -> list[Any]:
            names, found = item
            counts = collections.Counter(names)
            text = ", ".join(f"{n} {k}" if n > 1 else k for k, n in counts.items())
            return [scaled(_nbytes(found)), scaled(sum(i.flops for i in found)), text]

        columns = {"bytes": ">7", "kept": "23", "made by": "14", "read by": "15", "because": ""}
        kept = lambda item: [scaled(_nbytes(item[1])), *item[0]]  # noqa: E731
        more = "more; KeptReport.arrays has all"
        lines = table(columns, _groups(self.arrays, of_array), kept, _SHOWN, more)
        if self.because:
            return [*lines, "", *nothing]
        columns = {"bytes": ">7", "FLOPs": ">7", "computed again, and not kept": ""}
        islands = _groups(self.islands, lambda island: island.recomputed)
        more = "more; KeptReport.islands has all"
        return [*lines, "", *table(columns, islands, again, _SHOWN, more)]


def _groups(items: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    """Returns what is alike together, the groups of the most bytes first."""
    found: dict[Any, list[Any]] = collections.defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return sorted(found.items(), key=lambda group: -_nbytes(group[1]))


def _largest(cut: CutJaxpr) -> list[CutValue]:
    """Returns the largest values of a cut, in program order."""
    sizes = [-value.nbytes for value in cut.values]
    first = sorted(range(len(sizes)), key=sizes.__getitem__)[:_BARS]
    return [cut.values[k] for k in sorted(first)]


def _nbytes(items: Sequence[KeptArray] | Sequence[Island]) -> int:
    return sum(item.nbytes for item in items)


@with_usage("explain_kept(fn, *args)")
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
        >>> from jmp_autocast import BF16, autocast, keep_less
        >>> from jmp_autocast.inspect import explain_kept
        >>> def loss(params, x):
        ...     layer = lambda x, w: (jax.nn.gelu(x @ w), None)
        ...     return jax.lax.scan(layer, x, params["w"])[0].sum()
        >>> mixed = keep_less(autocast(loss, BF16))
        >>> report = explain_kept(mixed, {"w": jnp.ones((3, 8, 8))}, jnp.ones((4, 8)))
        >>> report.islands[-1].recomputed.count("tanh"), report.share < 0.5
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


def arrays_kept(planned: PlannedCall) -> list[KeptArray]:
    """Returns the arrays that a call of a wrapper of `autocast` keeps, as its residuals say.

    Args:
        planned: The planned call.
    """
    closed = fresh_make_jaxpr(planned.declared, *planned.call.shapes)
    return kept_arrays(_cut(closed, planned.call, planned.residuals)[0].planned)


def _cut(
    closed: ClosedJaxpr, call: arguments.Call, choice: ResidualChoice
) -> tuple[Emitter, ClosedJaxpr]:
    """Returns what was planned for the backward pass of a program, and the program that does it."""
    emitter, is_param = Emitter(choice), [source is Source.PARAM for source in call.sources]
    return emitter, fresh_make_jaxpr(lambda *xs: emitter.run(closed, xs, is_param), *call.shapes)


def _report(
    name: str, closed: ClosedJaxpr, call: arguments.Call, choice: ResidualChoice
) -> KeptReport:
    shapes, is_param = call.shapes, [source is Source.PARAM for source in call.sources]
    emitter = Emitter(choice)

    def keeps(program: Callable[..., Any]) -> KeptBytes:
        return kept_bytes(program, shapes, [i for i, param in enumerate(is_param) if param])

    declared = kept = keeps(jaxpr_as_fun(closed))
    if not choice.is_off:
        emitter, after = _cut(closed, call, choice)
        kept = keeps(jaxpr_as_fun(after))
    return KeptReport(
        name,
        choice.residuals,
        declared.nbytes,
        kept.nbytes,
        tuple(kept_arrays(emitter.planned)),
        tuple(islands(emitter.planned)),
        tuple(cut_jaxprs(emitter.planned)),
        "" if choice.is_off or islands(emitter.planned) else _because(closed, choice, keeps),
    )


def _because(closed: ClosedJaxpr, choice: ResidualChoice, keeps: Callable[..., Any]) -> str:
    """Returns why nothing of a program is computed again, "" where it is not known."""
    if any(runs_again(eqn) for eqn, _ in equations_in(closed)):
        either = f"a layer takes that or residuals={choice.residuals!r}"
        return f"jax.checkpoint keeps what its policy saves; {either}"
    if not choice.loops_only or has_loop(closed):
        return ""
    whole = Emitter(dataclasses.replace(choice, residuals="recompute"))
    nbytes = keeps(lambda *xs: whole.run(closed, xs, [False] * len(xs))).nbytes
    more = f"; 'recompute' would keep {scaled(nbytes)}B" if nbytes else ""
    return f"{choice.residuals!r} plans loops only, and there is none{more}"


# A parameter stays one through these: what the backward pass keeps of it is in memory anyway.
_MOVES = having("moves") | having("same") | {"convert_element_type", "source_view"}
# What follows the first operand are indices, a padding value, or the same source in 16 bits.
_FIRST = having("first")
_ZEROS = having("zeros")


class _Kind(enum.Enum):
    CONST = "const"  # made of constants alone
    PARAM = "param"  # a parameter, moved or cast
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class KeptBytes:
    """The bytes of activations that the backward pass keeps.

    Args:
        nbytes: All of them, None where they are not known.
        float32_nbytes: Those in float32, or float64 where that is the wide dtype.
        uncast_nbytes: What the same arrays would take if nothing were cast: all in float32, a copy
            is the array itself, and that of an input is in memory anyway.
        error: Why they are not known: what JAX, or a rule of the user's own, said.
    """

    nbytes: int | None = None
    float32_nbytes: int | None = None
    uncast_nbytes: int | None = None
    error: str = ""


def kept_bytes(
    program: Callable[..., Sequence[Any]],
    shapes: Sequence[Any],
    params: Sequence[int],
    wide: np.dtype = FLOAT32,
) -> KeptBytes:
    """Returns what `jax.vjp` of a program keeps.

    The derivative is that of all float outputs with respect to the parameters, or to all float
    inputs of a program without parameters. Each array counts once. Inputs of the program do not
    count, nor do 16-bit copies and movements of parameters, nor what is made of constants alone.
    8-bit copies do: they are kept beside the parameters. The
    numbers are those of the jaxpr: XLA may merge equal arrays, and compute cheap ones again.

    Args:
        program: From arrays to arrays.
        shapes: What it takes.
        params: The positions of its parameters.
        wide: The wide dtype of the policy.
    """
    floats = [i for i, x in enumerate(shapes) if jnp.issubdtype(x.dtype, jnp.floating)]
    wanted = [i for i in params if i in floats] or floats
    # A program without float inputs has no derivative, and keeps nothing.
    if not wanted:
        return KeptBytes()

    def kept(*arrays: Any) -> Any:
        def floats_of(*given: Any) -> list[Any]:
            return [x for x in program(*given) if jnp.issubdtype(x.dtype, jnp.floating)]

        of_wanted = of_positions(floats_of, arrays, wanted)
        outputs, pullback = jax.vjp(of_wanted, *(arrays[i] for i in wanted))
        # A program without a backward pass raises here: `jax.vjp` alone only linearizes it.
        pullback(outputs)
        return pullback

    try:
        jaxpr = body_of(fresh_make_jaxpr(kept, *shapes))
    except Exception as error:  # JAX, or a rule of the user's own, may refuse in any way
        return KeptBytes(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    # `jax.vjp` also computes the outputs. What they alone need is not kept.
    jaxpr = without_dead_equations(jaxpr)
    inputs = [_Kind.PARAM if i in params else _Kind.OTHER for i in range(len(shapes))]
    kept_arrays = zip(jaxpr.outvars, _kinds(jaxpr, inputs), strict=True)
    # A view of a source is its 16-bit copy: several views are one array.
    views: dict[Any, Any] = {eqn.outvars[0]: eqn.invars[1] for eqn in jaxpr.eqns if _is_view(eqn)}
    arrays = {views.get(v, v) for v, kind in kept_arrays if kind is _Kind.OTHER}
    arrays.difference_update(jaxpr.invars)
    full = sum(nbytes_of(v) for v in arrays if is_in(getattr(v.aval, "dtype", None), wide))
    return KeptBytes(sum(map(nbytes_of, arrays)), full, _uncast_nbytes(jaxpr, arrays, wide))


def _uncast_nbytes(jaxpr: AnyJaxpr, arrays: Set[Any], wide: np.dtype) -> int:
    """Returns the bytes of arrays as they would be without casts to narrower dtypes."""
    # Of a program in float32 there is no trace: to differentiate it as well would take half as long
    # again as the whole report.
    casts = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if _is_cast(eqn)}
    sources = set()
    for array in arrays:
        while array in casts:
            array = casts[array]
        sources.add(array)
    sources.difference_update(jaxpr.invars)
    narrow = {dtype.name for dtype in narrow_dtypes(wide)}
    names = ((v, str(getattr(v.aval, "dtype", None))) for v in sources)
    return sum(nbytes_of(v, wide.name if name in narrow else None) for v, name in names)


def _is_cast(eqn: JaxprEqn) -> bool:
    is_cast = eqn.primitive.name == "convert_element_type"
    return is_cast and not isinstance(eqn.invars[0], Literal)


def is_gradient(jaxpr: AnyJaxpr) -> bool:
    """True for a program that holds a backward pass: what it keeps is inside it.

    Args:
        jaxpr: An open or closed jaxpr.
    """
    return any("transpose(" in name_stack(eqn) for eqn, _ in equations_in(jaxpr))


def _is_view(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "source_view" and not isinstance(eqn.invars[1], Literal)


def _kinds(jaxpr: AnyJaxpr, inputs: Sequence[_Kind]) -> list[_Kind]:
    """Returns the kind of each output of a jaxpr."""

    def step(i: int, eqn: JaxprEqn, given: list[_Kind]) -> list[_Kind]:
        held, count = bodies(eqn), len(eqn.outvars)
        if len(held) != 1:
            return [_of_equation(eqn, given)] * count
        (body,) = held
        made = _kinds(body.jaxpr, entering(body, given, _Kind.OTHER))
        return leaving(body, made, _Kind.OTHER, count)

    return follow(jaxpr, inputs, _Kind.CONST, step)


def _of_equation(eqn: JaxprEqn, given: Sequence[_Kind]) -> _Kind:
    if all(kind is _Kind.CONST for kind in given) and not eqn.effects:
        return _Kind.CONST
    if eqn.primitive.name in _ZEROS:
        return _Kind.CONST  # XLA keeps nothing of them
    arrays = given[:1] if eqn.primitive.name in _FIRST else given
    moved = eqn.primitive.name in _MOVES and _Kind.OTHER not in arrays
    return _Kind.PARAM if moved else _Kind.OTHER
