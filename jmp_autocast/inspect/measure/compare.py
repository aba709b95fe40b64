"""`compare`: the float32 and the mixed program in one run, value by value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax

from ...autocast import Autocast, PlannedCall
from ...call.arguments import name_of
from ...call.options import tool_options
from ...interpreters import Rewriter
from ...policies import PolicyLike
from ...policies.errors import with_usage
from ..calls import check_concrete, check_range, differentiated, is_loss, returned_by
from ..progress_bar import Show, shown_progress
from ..report.explain import looked_at
from .comparison import Comparison, cotangent_rows, equation_rows, gradient_errors
from .cotangents import Tap, cotangents
from .devices import is_on_one_device, on_device
from .error_probe import ArrayError, ErrorProbe, distance, distance_and_norms
from .evaluator import Evaluated, Evaluator
from .measured import is_measurable, measured_equations
from .named_values import ProgramComparison, compare_arrays, compare_programs
from .side_by_side import Program

# `explain` takes shapes, and a user may pass the same arguments here.
_ABSTRACT = "Pass arrays, or use explain, which computes nothing."


@overload
def compare(
    fn: Callable[..., Any], *args: Any, against: Callable[..., Any], **kwargs: Any
) -> ProgramComparison: ...
@overload
def compare(fn: Mapping[str, Any], *, against: Mapping[str, Any]) -> ProgramComparison: ...
@overload
def compare(
    fn: Callable[..., Any],
    *args: Any,
    policy: PolicyLike | None = ...,
    argnums: int | Sequence[int] | None = ...,
    **kwargs: Any,
) -> Comparison: ...
@with_usage("compare(fn, *args)")
def compare(
    fn: Any,
    *args: Any,
    policy: PolicyLike | None = None,
    argnums: int | Sequence[int] | None = None,
    against: Any = None,
    **kwargs: Any,
) -> Any:
    """Runs a function in float32 and in mixed precision, and finds where the error arises.

    Both programs run side by side, equation by equation, so that each value has its counterpart.
    The error that an equation *introduces* is its error on the operands of the float32 program,
    rounded to the dtypes that it reads; the rest of its error comes from earlier equations. The
    float32 program decides which branch runs, and how often a ``while`` iterates.

    Each equation is compiled by itself, once for all that are like it, so that a model of many
    equal layers takes hardly longer than one of few. Loops, branches and device maps are compiled
    as a whole. So are the two backward passes, and all their cotangents are in memory together.

    Args:
        fn: The function in float32, or an `autocast` wrapper, whose options then apply. Or a dict
            of arrays by name, to compare with the dict ``against``: what hooks of another framework
            stored, say.
        *args: Its positional arguments.
        policy: As for `autocast`; None for the wrapper's own, or the default.
        argnums: As for ``jax.grad``: compares the gradients of the function, which returns a
            scalar, with respect to these arguments, as ``jax.grad(autocast(fn))`` gives them, and
            the cotangents of the values in between. None for no gradients.
        against: Another function of the same arguments, to compare the first one with instead of
            with itself in mixed precision: a sampler with a trainer, decoding with prefill, a batch
            of 1 with one of 8. Both run as they are, and values belong together by name: the last
            value of a ``jax.named_scope``, what ``jax.ad_checkpoint.checkpoint_name`` names, and
            the outputs. ``first_beyond()`` is the first value that is off.
        **kwargs: Its keyword arguments.

    Returns:
        The comparison: ``print(comparison)``, ``comparison.rows``, the worst introduced error
        first. With ``against`` a `ProgramComparison`.

    Raises:
        TypeError: ``fn`` is not callable, an argument is no array but a
            ``jax.ShapeDtypeStruct``, or ``fn`` returns no scalar float and ``argnums`` is given.
        ValueError: ``fn`` is an `autocast` wrapper that is not enabled, or one whose policy
            ``policy`` contradicts, or ``argnums`` is out of range, or ``against`` comes with one of
            them; or two dicts have no name in common.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import Policy, compare
        >>> def f(x):
        ...     with jax.named_scope("difference"):
        ...         y = x @ jnp.eye(8)
        ...         return ((y + 100.0) - 100.0) @ jnp.eye(8)
        >>> policy = Policy("bfloat16", level="compute")  # by default such a sum is in float32
        >>> comparison = compare(f, jnp.full((2, 8), 0.1), policy=policy)
        >>> worst = comparison.rows[0]
        >>> worst.primitive, worst.scope, worst.introduced > 0.5
        ('sub', 'difference', True)
    """
    if against is not None:
        given = {"policy": policy}
        if named := [name for name, x in {**given, "argnums": argnums}.items() if x is not None]:
            raise ValueError(
                f"compare runs functions as they are with against=, and got {named[0]}= as well. "
                "Pass autocast(fn, ...) or jax.grad(fn) as the functions."
            )
        check_concrete("compare", (args, kwargs), _ABSTRACT)
        if isinstance(fn, Mapping):
            return compare_arrays(fn, against, args, kwargs)
        return compare_programs(fn, against, args, kwargs)
    wrapper = looked_at(fn, tool_options(policy), "compare", args, kwargs)
    check_concrete("compare", (args, kwargs), _ABSTRACT)
    with shown_progress(None) as show:
        return _compared(fn, wrapper, args, kwargs, argnums, show)


def _compared(
    fn: Any, wrapper: Autocast, args: Any, kwargs: Any, argnums: Any, show: Show
) -> Comparison:
    steps = 2 if argnums is None else 3
    show("tracing and planning", 0, steps)
    planned = wrapper.planned(*args, **kwargs)
    check_range(argnums, len(args), "the call, which has")
    of_call = planned.call.paths, planned.call.arrays, planned.untrained
    wrt = differentiated(argnums, len(args), *of_call)
    if wrt:
        _check_scalar(planned, fn)
    arrays = [on_device(x) for x in planned.call.arrays]

    def run(*arrays: Any) -> Evaluated:
        return Evaluator(ErrorProbe()).start(planned.closed, _programs(planned), arrays)

    show("running both programs, equation by equation", 1, steps)
    # Each kind of equation is compiled once, where one program would be compiled whole.
    evaluated = (run if is_on_one_device(planned.closed, arrays) else jax.jit(run))(*arrays)
    outputs = {
        i: distance_and_norms(*each)[0]
        for i, each in enumerate(evaluated.outputs)
        if is_measurable(jax.typeof(each[0]))
    }
    if wrt:
        show("compiling both backward passes", 2, steps)
    taps, made, gradients = _derivatives(planned, arrays, wrt) if wrt else ([], [], {})
    readings, *distances = jax.device_get((evaluated.readings, outputs, made, gradients))
    outputs, made, gradients = jax.tree.map(lambda x: x.item(), distances)
    return Comparison(
        name=name_of(fn),
        compute_dtype=str(wrapper.policy.compute_dtype),
        rows=equation_rows(measured_equations(planned.closed), readings),
        outputs=outputs,
        cotangents=cotangent_rows(taps, made),
        gradients=gradient_errors(gradients),
    )


def _derivatives(
    planned: PlannedCall, arrays: Sequence[Any], wrt: Sequence[int]
) -> tuple[list[Tap], list[ArrayError], dict[str, Any]]:
    """Returns the values that have a cotangent, how far it is off, and so for the gradients."""
    programs = _programs(planned, differentiated=True)
    taps: list[Tap] = []

    # Compiled, unlike the forward pass, so that the gradients are those that training gets: XLA
    # rounds less often than the program says. Float16 gradients of single equations were others.
    @jax.jit
    def run(*arrays: Any) -> Any:
        both = [cotangents(planned.closed, program, arrays, wrt) for program in programs]
        # Both programs have the same taps: rows are named by the float32 one's.
        taps[:] = both[0][0]
        return [made for _, *made in both]

    made, gradients = (zip(*each, strict=True) for each in zip(*run(*arrays), strict=True))
    paths = [planned.call.paths[i] for i in wrt]
    of_gradients = [distance_and_norms(*pair) for pair in gradients]
    return taps, [distance(*pair) for pair in made], dict(zip(paths, of_gradients, strict=True))


def _programs(planned: PlannedCall, differentiated: bool = False) -> tuple[Program, Program]:
    """Returns the float32 and the mixed program, for one trace: the rewriter keeps jaxprs of it."""
    rewriter = Rewriter(planned.planner)
    return Program(planned.plan), Program(planned.plan, rewriter, differentiated)


def _check_scalar(planned: PlannedCall, fn: Any) -> None:
    avals, returned = returned_by(planned.closed)
    if not is_loss(avals):
        raise TypeError(
            f"compare(..., argnums=) differentiates {name_of(fn)}, which must return a scalar "
            f"float first, and returns {returned}. Leave argnums out, or pass a loss."
        )
