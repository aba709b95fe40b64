"""`compare`: the float32 and the mixed program in one run, value by value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...arguments import name_of
from ...interpreters import Rewriter
from ...interpreters.compat import body_of
from ...transform import PlannedCall
from ..report.explain import wrapper_of
from .comparison import Comparison, comparison_of
from .cotangents import Tap, cotangents
from .error_probe import Distance, ErrorProbe, ErrorReading, distance
from .evaluator import Evaluator
from .materialize import materialized
from .measured import is_measurable, measured_equations
from .programs import Program


def compare(
    fn: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Runs a function in float32 and in mixed precision, and finds where the error arises.

    Both programs run in one compiled function, equation by equation, so that each value has its
    counterpart. The error that an equation *introduces* is what it makes of the float32 program's
    operands, rounded to the dtypes that it reads; the rest of its error is carried on from before.
    A branch and the number of a ``while`` loop's iterations are the float32 program's.

    It compiles and runs a multiple of the function itself.

    Args:
        fn: The function in float32, or what `autocast` made of it, whose options then hold.
        *args: Its positional arguments.
        policy: As for `autocast`; None for the wrapper's own, or float16.
        argnums: As for ``jax.grad``: compares the gradients of the function, which returns a
            scalar, with respect to these arguments, as ``jax.grad(autocast(fn))`` gives them, and
            the cotangents of the values in between. None for no gradients.
        **kwargs: Its keyword arguments.

    Returns:
        The comparison: ``print(comparison)``, ``comparison.rows``, the worst introduced error
        first.

    Raises:
        TypeError: ``fn`` is not callable, an argument is no array but a
            ``jax.ShapeDtypeStruct``, or ``fn`` returns no scalar float and ``argnums`` is given.
        ValueError: ``fn`` is an `autocast` wrapper that is not enabled, or one whose policy
            ``policy`` contradicts, or ``argnums`` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, compare
        >>> def f(x):
        ...     with jax.named_scope("difference"):
        ...         y = x @ jnp.eye(4)
        ...         return ((y + 100.0) - 100.0) @ jnp.eye(4)
        >>> comparison = compare(f, jnp.full((2, 4), 0.1), policy=BF16)
        >>> worst = comparison.rows[0]
        >>> worst.primitive, worst.scope, worst.introduced > 0.5
        ('sub', 'difference', True)
    """
    wrapper = wrapper_of(fn, policy, "compare")
    _check_concrete(args, kwargs)
    planned = wrapper.planned(*args, **kwargs)
    wrt = _positions(planned, args, argnums)
    if wrt:
        _check_scalar(planned, fn)
    taps: list[Tap] = []

    @jax.jit
    def run(*arrays: Any) -> _Measured:
        evaluated = Evaluator(ErrorProbe()).start(planned.closed, _programs(planned), arrays)
        outputs = [
            distance(*value.arrays) if is_measurable(jax.typeof(value.arrays[0])) else None
            for value in evaluated.outputs
        ]
        if not wrt:
            return _Measured(evaluated.readings, outputs, [], [])
        declared, mixed = (cotangents(planned.closed, p, arrays, wrt) for p in _programs(planned))
        taps[:] = declared[0]
        made = [
            distance(materialized(a), materialized(b))
            for a, b in zip(declared[1], mixed[1], strict=True)
        ]
        gradients = [distance(a, b) for a, b in zip(declared[2], mixed[2], strict=True)]
        return _Measured(evaluated.readings, outputs, made, gradients)

    measured = jax.device_get(run(*planned.call.arrays))
    return comparison_of(
        name=name_of(fn),
        compute_dtype=str(wrapper.policy.compute_dtype),
        equations=list(measured_equations(planned.closed)),
        readings=measured.readings,
        outputs=measured.outputs,
        taps=taps,
        cotangents=measured.cotangents,
        gradients=dict(zip((planned.call.paths[i] for i in wrt), measured.gradients, strict=True)),
    )


def _programs(planned: PlannedCall) -> tuple[Program, Program]:
    """Returns the float32 and the mixed program, for one trace: the rewriter keeps jaxprs of it."""
    return Program(planned.plan), Program(planned.plan, Rewriter(planned.planner.plan))


class _Measured(NamedTuple):
    readings: ErrorReading
    outputs: list[Distance | None]
    cotangents: list[Distance]
    gradients: list[Distance]


def _check_concrete(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"compare runs the function and needs arrays, got {leaf!r}. Pass arrays, or use "
                "explain, which computes nothing."
            )


def _positions(
    planned: PlannedCall, args: tuple[Any, ...], argnums: int | Sequence[int] | None
) -> list[int]:
    """Returns the positions, among the flat arrays, of what is differentiated."""
    if argnums is None:
        return []
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if not isinstance(number, int) or not -len(args) <= number < len(args):
            raise ValueError(
                f"argnums={argnums!r} must name positional arguments of the call, which has "
                f"{len(args)}, numbered from 0."
            )
    roots = {str(number % len(args)) for number in numbers}
    return [
        i
        for i, (path, x) in enumerate(zip(planned.call.paths, planned.call.arrays, strict=True))
        if path.split("/", 1)[0] in roots and jnp.issubdtype(jnp.result_type(x), jnp.floating)
    ]


def _check_scalar(planned: PlannedCall, fn: Any) -> None:
    avals = [v.aval for v in body_of(planned.closed).outvars]
    if avals and avals[0].shape == () and jnp.issubdtype(avals[0].dtype, jnp.floating):
        return
    raise TypeError(
        f"compare(..., argnums=) differentiates {name_of(fn)}, which must return a scalar float "
        f"first, and returns {', '.join(map(str, avals)) or 'nothing'}. Leave argnums out, or "
        "pass a loss."
    )
