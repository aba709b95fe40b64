"""`explain_effects`: what rounding each operation and parameter does to a loss."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...autocast import Autocast, opened
from ...call.arguments import check_function, flatten, name_of
from ...formats import Format, parse
from ...interpreters.compat import aval_of, body_of, fresh_make_jaxpr, mark_frames
from ...policies.errors import did_you_mean, shown, with_usage, wrong_type
from ...policies.patterns import check_pattern, match_depth
from ..calls import calls_of, check_range, differentiated, is_loss, returned_by
from ..measure.devices import on_device
from ..progress_bar import shown_progress
from .effects_report import Effect, Effects, Kind
from .random_sum import floats_in, norms_of, random_sum
from .rounding import narrowed
from .sites import Found, Site, Sites, parameter_site, sites_of
from .walk import NUMBERS, Lowered, tapped

mark_frames(__file__)

# How many operations of a format really run in it, if the user does not say. First order is enough
# from seven bits of mantissa on; below, the second order of single products is larger than it.
_FEW, _MANY = 3, 10
_DIGITS = 7
# A change of the loss below so many units in its last place is float32's own rounding.
_UNITS = 4


@with_usage("explain_effects(loss, *args)")
def explain_effects(
    loss: Callable[..., Any],
    *args: Any,
    formats: Any = "bfloat16",
    batches: Iterable[tuple[Any, ...]] | None = None,
    argnums: int | Sequence[int] = 0,
    scopes: str | Sequence[str] | None = None,
    kinds: Kind | Sequence[Kind] = ("product", "parameter"),
    runs: int | None = None,
    relative: bool = False,
    **kwargs: Any,
) -> Effects:
    """Predicts what rounding each operation and parameter to each format does to a loss.

    One forward and backward pass in float32 says it for all of them: the change of the loss is, to
    first order, the error that the rounding makes times the cotangent. A product that is rounded
    reads its operands in the format, and adds up in float32. Its result is rounded to a format of
    16 bits, and stays float32 for fewer, as that of products of 8 bits. Of any other operation the
    result is rounded. What stands in a loop is rounded in each iteration.

    Where first order is not enough, the operations with the largest predictions are really rounded,
    each alone, and both numbers stand in the report. These runs share one more program, without a
    backward pass.

    Args:
        loss: The function in float32. Its result, or the first of its results, is a scalar.
        *args: Its positional arguments.
        formats: The formats, by name, or one of them. Compiled and run, one takes 2.5 to 3 times
            as long as ``jit(grad)`` in a model of 26 layers; each further one adds to that.
        batches: Instead of ``args``: tuples of arguments of equal shapes, for the mean over them
            and the deviation from it.
        argnums: The arguments that hold the parameters, as for ``jax.grad``. Operations that do not
            depend on them are left out.
        scopes: Patterns of the scopes to look at, as in `Policy.with_scopes`; None for all. The
            fewer, the sooner the program is compiled. Parameters are left out then.
        kinds: What to look at: ``"product"`` (a matmul or a convolution), ``"operation"`` (any
            other), ``"parameter"``, or several of them. With other operations, of which there are
            ten times as many, the program compiles for several times as long.
        runs: How many operations to really round in each format. None for 3, and for 10 in formats
            with less than 7 bits of mantissa. What stands in a loop fills up to 10.
        relative: The function returns arrays, such as a gradient or an optimizer's update, in place
            of a loss. Predicted is the relative error of all float results together, in the L2
            norm, as if the errors of roundings were independent.
        **kwargs: Its keyword arguments.

    Returns:
        The effects: ``print(effects)``, ``effects.of("bfloat16")``, ``effects.by_scope("e4m3")``.

    Raises:
        TypeError: An argument has the wrong type, or ``loss`` returns no scalar float first.
        ValueError: There is no float parameter, no such format or scope, or batches differ in their
            shapes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain_effects
        >>> def loss(params, x):
        ...     with jax.named_scope("hidden"):
        ...         h = jnp.tanh(x @ params["hidden"])
        ...     with jax.named_scope("head"):
        ...         return jnp.mean((h @ params["head"]) ** 2)
        >>> params = {"hidden": jnp.full((4, 4), 0.3), "head": jnp.full((4, 1), 0.7)}
        >>> effects = explain_effects(loss, params, jnp.ones((2, 4)), formats=["bfloat16", "e4m3"])
        >>> [(row.scope, row.primitive) for row in effects.of("e4m3", "product")]
        [('head', 'dot_general'), ('hidden', 'dot_general')]
    """
    check_function(loss, "explain_effects", "Pass the function itself, then its arguments.")
    if isinstance(loss, Autocast):
        raise ValueError(
            f"explain_effects got {loss!r}, which autocast has already wrapped, and rounds the "
            "operations itself. Pass the function that was wrapped."
        )
    given = [formats] if isinstance(formats, str) or not isinstance(formats, Iterable) else formats
    parsed = [parse(each, "formats") for each in given]
    if not parsed:
        raise ValueError("formats must name at least one format, got none. Write ['bfloat16'].")
    named, patterns = _checked_kinds(kinds), None
    if scopes is not None:
        patterns = [check_pattern(x) for x in ([scopes] if isinstance(scopes, str) else scopes)]
    _check_runs(runs)
    if not isinstance(relative, bool):
        fix = "Write True for a function that returns arrays, such as jax.grad(loss)."
        raise wrong_type("relative must be a bool", relative, fix)
    with shown_progress(None) as show:
        show("tracing", 0, 3)
        program, arrays = _traced(
            loss, calls_of("explain_effects", args, batches), kwargs, argnums, relative
        )
        sites = _wanted(program.sites, patterns, named)
        look = _Look(program, sites, parsed, patterns is None and "parameter" in named)
        show("one forward and backward pass", 1, 3)
        measure = jax.jit(look.measure)
        sizes, found = zip(*(jax.device_get(measure(*each)) for each in arrays), strict=True)
        look.predicted(found)
        show("rounding single operations", 2, 3)
        look.verified(arrays, runs)
        return look.report(name_of(loss), float(np.mean(sizes)), len(arrays))


def _check_runs(runs: Any) -> None:
    fix = "Write runs=0 for none, or a number such as runs=10."
    if runs is not None and (not isinstance(runs, int) or isinstance(runs, bool)):
        raise wrong_type("runs must be a number of operations", runs, fix)
    if runs is not None and runs < 0:
        raise ValueError(f"runs must not be negative, got {runs}. {fix}")


@dataclasses.dataclass(frozen=True)
class _Program:
    """A traced loss.

    Args:
        closed: Its jaxpr.
        paths: The path of each input in the arguments.
        wrt: The positions of the inputs that are parameters.
        found: What looking for sites found besides them.
        sites: All sites.
        relative: Its results are arrays, whose relative error counts.
    """

    closed: Any
    paths: Sequence[str]
    wrt: Sequence[int]
    found: Found
    sites: Sites
    relative: bool


def _traced(
    loss: Any,
    calls: Sequence[tuple[Any, ...]],
    kwargs: dict[str, Any],
    argnums: Any,
    relative: bool,
) -> tuple[_Program, list[list[Any]]]:
    """Returns the program of the first call, and the arrays of all."""
    arrays: list[list[Any]] = []
    program = None
    for i, args in enumerate(calls):
        check_range(argnums, len(args), "the call, which has")
        # What a call changes in its objects is lost here: nothing of it is looked at.
        with opened(loss, args, kwargs) as pure:
            call = flatten(pure.fn, (), pure.args, pure.kwargs)
            if program is None:
                closed = fresh_make_jaxpr(call.traceable, *call.arrays)
                wrt = differentiated(argnums, len(args), call.paths, call.arrays, pure.untrained)
                program = _checked(loss, closed, call.paths, wrt, argnums, relative)
        arrays.append([on_device(x) for x in call.arrays])
        types = [[jax.typeof(x) for x in each] for each in (arrays[0], arrays[-1])]
        if types[0] != types[1]:
            raise ValueError(
                f"batches[{i}] must hold arrays of the same shapes and dtypes as batches[0], got "
                f"{shown(arrays[-1])} after {shown(arrays[0])}. Leave out the last, smaller batch."
            )
    assert program is not None
    return program, arrays


def _checked(
    loss: Any, closed: Any, paths: Sequence[str], wrt: Sequence[int], argnums: Any, relative: bool
) -> _Program:
    avals, returned = returned_by(closed)
    if relative and not any(jnp.issubdtype(x.dtype, jnp.floating) for x in avals):
        raise TypeError(
            f"explain_effects with relative=True takes the error of float arrays, and "
            f"{name_of(loss)} returns {returned}. Pass a function such as jax.grad(loss)."
        )
    if not relative and not is_loss(avals):
        raise TypeError(
            f"explain_effects differentiates {name_of(loss)}, which must return a scalar float "
            f"first, and returns {returned}. Pass a loss, such as the mean of it, or relative=True "
            "for the relative error of arrays."
        )
    if not wrt:
        raise ValueError(
            f"argnums={argnums!r} must name arguments with float parameters, and holds none: "
            f"explain_effects differentiates {name_of(loss)} by them. Pass the parameters as an "
            "argument, and its position as argnums."
        )
    found = Found()
    sites = sites_of(closed, [i in wrt for i in range(len(paths))], found)
    if not any(sites.live if relative else sites.live[:1]):
        raise ValueError(
            f"argnums={argnums!r} must name arguments that the loss depends on, and no derivative "
            f"of {name_of(loss)} by them passes through it. Name other arguments, or remove a "
            "stop_gradient or a rounding that is in the way."
        )
    return _Program(closed, paths, wrt, found, sites, relative)


def _checked_kinds(kinds: Any) -> tuple[Any, ...]:
    """Returns the kinds that the user asks for."""
    known, named = get_args(Kind), (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for each in named:
        if each not in known:
            raise ValueError(
                f"kinds must be {', '.join(map(repr, known))}, or several of them, got "
                f"{shown(each)}.{did_you_mean(str(each), known)} Leave it out for products and "
                "parameters."
            )
    return named


def _wanted(sites: Sites, patterns: Sequence[str] | None, kinds: Sequence[Kind]) -> Sites:
    """Returns the sites of some kinds, in the scopes that patterns match; None for all scopes.

    Raises:
        ValueError: No site stands in a scope that a pattern matches.
    """
    scopes = [_names(site) for site in sites.each()]
    for pattern in patterns or ():
        if all(match_depth(pattern, names) is None for names in scopes):
            known = {name for names in scopes for name in names}
            fix = did_you_mean(pattern.strip("*/"), known)
            fix = fix or f" Its scopes are {', '.join(sorted(known)[:8]) or 'none'}."
            raise ValueError(
                f"scopes must match scopes of the program, got {pattern!r}, which matches "
                f"none.{fix}"
            )

    def wanted(site: Site) -> bool:
        matches = (match_depth(p, _names(site)) is not None for p in patterns or ())
        return site.kind in kinds and (patterns is None or any(matches))

    return sites.where(wanted)


def _names(site: Site) -> list[str]:
    scope = site.equation.scope
    return scope.split("/") if scope else []


class _Look:
    """One look at a program.

    Args:
        program: The program.
        sites: The sites that are looked at.
        formats: The formats.
        params: Whether the parameters are looked at, too.
    """

    def __init__(
        self, program: _Program, sites: Sites, formats: Sequence[Format], params: bool
    ) -> None:
        self._program, self._sites, self._formats = program, sites, formats
        self._params = list(program.wrt) if params else []
        # What is looked at, in the order of its numbers: sites, then parameters.
        inputs = body_of(program.closed).invars
        arguments = [parameter_site(program.paths[i], aval_of(inputs[i])) for i in self._params]
        self._each = [*sites.each(), *arguments]
        self._numbers: list[np.ndarray] = []
        self._measured: dict[tuple[int, int], float] = {}
        self._resolution = 0.0

    def measure(self, *arrays: Any) -> tuple[Any, Any]:
        """Returns the loss, and the numbers of all sites and parameters, by iteration."""
        program = self._program

        def scalar(outputs: list[Any]) -> tuple[Any, Any]:
            if not program.relative:
                return outputs[0], outputs[0]
            floats = floats_in(outputs)
            return random_sum(floats, together=True), norms_of(floats, together=True)[0]

        return tapped(program.closed, self._sites, self._formats, arrays, self._params, scalar)

    def predicted(self, found: Sequence[Any]) -> None:
        """Takes what was measured of each batch."""
        form = (len(found), -1, len(self._formats), NUMBERS)
        each = zip(*found, strict=True)
        # By site or parameter: of (batch, iteration, format, number).
        self._numbers = [np.asarray(x, np.float64).reshape(form) for x in each]

    def verified(self, arrays: Sequence[Sequence[Any]], runs: int | None) -> None:
        """Really lowers what has the largest predictions, each alone."""
        chosen: list[tuple[int, int]] = []
        for k, format in enumerate(self._formats):
            sizes = [self._size(i, k) for i in range(len(self._numbers))]
            order = [i for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]) if sizes[i] > 0]
            most = _FEW if format.mantissa >= _DIGITS else _MANY
            first = order[: most if runs is None else runs]
            # In a loop the rounding of an iteration changes what the next one rounds: the errors
            # are then others than those of float32's values, though as large.
            looped = [i for i in order if i not in first and self._each[i].loops]
            first += looped[: 0 if runs is not None else _MANY - len(first)]
            chosen += [(i, k) for i in first]
        if not chosen:
            return
        run = jax.jit(lambda *given: self._lowered(chosen, *given))
        switches = np.eye(len(chosen), dtype=bool)
        changes, sizes = np.zeros(len(chosen)), [1.0]
        for each in arrays:
            exact = run(np.zeros(len(chosen), bool), *each)
            found = [run(row, *each) for row in switches]
            if self._program.relative:
                changes += [float(_distance(exact, x)) for x in found]
            else:
                changes += [float(x[0]) - float(exact[0]) for x in found]
                sizes.append(abs(float(exact[0])))
        self._measured = dict(zip(chosen, (changes / len(arrays)).tolist(), strict=True))
        self._resolution = _UNITS * float(jnp.finfo(jnp.float32).eps) * max(sizes[1:] or sizes)

    def _size(self, i: int, k: int) -> float:
        change, squares, _ = self._numbers[i][:, :, k].sum(1).mean(0)
        return max(0.0 if self._program.relative else abs(float(change)), float(squares) ** 0.5)

    def _lowered(self, chosen: Sequence[tuple[int, int]], switches: Any, *arrays: Any) -> list[Any]:
        """Returns the loss, or all float results, with some of the chosen lowered."""
        of_each: dict[int, dict[int, Any]] = {}
        for n, (i, k) in enumerate(chosen):
            of_each.setdefault(i, {})[k] = switches[n]
        numbered = itertools.count()

        def held(site: Site) -> dict[int, Any]:
            found = of_each.get(next(numbered), {})
            return {k: jnp.broadcast_to(x, site.loops) for k, x in found.items()}

        tree, given = self._sites.tree(held), list(arrays)
        for i, x in enumerate(self._params, len(self._each) - len(self._params)):
            for k, lowers in of_each.get(i, {}).items():
                given[x] = jnp.where(lowers, narrowed(arrays[x], self._formats[k]), given[x])
        made = Lowered(self._formats).run(self._program.closed, self._sites, given, tree)
        return floats_in(made) if self._program.relative else made[:1]

    def report(self, name: str, loss: float, batches: int) -> Effects:
        """Returns the report."""
        rows = [row for i in range(len(self._numbers)) for row in self._rows(i)]
        found = self._program.found
        return Effects(
            name=name,
            loss=loss,
            formats=tuple(each.name for each in self._formats),
            batches=batches,
            rows=tuple(_doubted(rows, self._resolution)),
            decisions=tuple(found.decisions),
            closed=tuple(found.closed),
            relative=self._program.relative,
        )

    def _rows(self, i: int) -> Iterable[Effect]:
        site = self._each[i]
        equation = site.equation
        for k, format in enumerate(self._formats):
            found = self._numbers[i][:, :, k]
            by_iteration = found[:, :, 1 if self._program.relative else 0]
            changes = by_iteration.sum(1)
            if self._program.relative:
                changes, by_iteration = np.sqrt(changes), np.sqrt(by_iteration)
            yield Effect(
                scope=equation.scope,
                source=equation.source,
                primitive=equation.primitive,
                kind=site.kind,
                inside=equation.inside,
                backward=equation.backward,
                shapes=equation.shapes,
                flops=int(np.prod(site.loops)) * site.flops,
                format=format.name,
                predicted=float(changes.mean()),
                spread=float(found[:, :, 1].sum(1).mean()) ** 0.5,
                deviation=float(changes.std()),
                measured=self._measured.get((i, k)),
                lost=int(found[:, :, 2].sum()),
                iterations=tuple(by_iteration.mean(0).tolist()) if site.loops else (),
                doubt="",
            )


@jax.jit
def _distance(exact: Sequence[Any], found: Sequence[Any]) -> Any:
    """Returns the relative error of all arrays together."""
    # What became infinite is not left out: the error is infinite, too.
    squares = [jnp.sum(jnp.square(y - x)) for x, y in zip(exact, found, strict=True)]
    return jnp.sqrt(sum(squares)) / norms_of(exact, together=True)[0]


def _doubted(rows: Sequence[Effect], resolution: float) -> Iterable[Effect]:
    """Returns the rows with what speaks against their predictions."""
    off: dict[str, list[bool]] = {}
    for row in rows:
        if row.measured is not None and not row.lost:
            off.setdefault(row.format, []).append(_is_off(row, resolution))
    unsure = {format for format, each in off.items() if 2 * sum(each) > len(each)}
    for row in rows:
        doubt = ""
        if row.lost:
            doubt = "range"
        elif row.measured is not None:
            doubt = "second order" if _is_off(row, resolution) else ""
        elif row.format in unsure:
            doubt = "not verified"
        elif row.iterations:
            doubt = "loop"
        yield dataclasses.replace(row, doubt=doubt)


def _is_off(row: Effect, resolution: float) -> bool:
    """Returns whether a prediction is off by more than a factor of 2, as far as float32 tells."""
    measured = row.measured or 0.0
    sizes = sorted((abs(row.predicted), abs(measured)))
    if sizes[1] - sizes[0] <= resolution and sizes[1] <= 2 * resolution:
        return False
    return row.predicted * measured <= 0 or sizes[1] > 2 * sizes[0]
