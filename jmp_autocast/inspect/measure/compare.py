"""`compare`: runs a program in float32 and in mixed precision, and compares their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax

from ...autocast import PlannedCall, wrapper_for
from ...call.arguments import name_of
from ...interpreters import Rewriter
from ...interpreters.compat import aval_of, body_of
from ...interpreters.primitives.evaluate import as_function, of_positions
from ...policies import PolicyLike
from ...policies.errors import with_usage
from ..calls import check_concrete, check_range, differentiated, is_loss
from .comparison import Comparison, equation_rows, gradient_errors
from .devices import is_on_one_device, on_device
from .error_probe import ErrorProbe, distance_and_norms
from .evaluator import Evaluated, Evaluator
from .measured import is_measurable, measured_equations
from .named_values import ProgramComparison, compare_arrays, compare_programs
from .programs import Program


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
    """Runs a function in float32 and in mixed precision, and locates the errors.

    Both programs run side by side, equation by equation, so that each value has its counterpart.
    The error that an equation *introduces* is its error without those of earlier equations: the
    equation runs in mixed precision, but on the operands of the float32 program, cast to the dtypes
    of mixed precision. The float32 program selects the branch of a ``cond`` and ends a ``while``.

    Each equation is compiled by itself, and equal equations are compiled once, so a model of many
    equal layers takes hardly longer than one of few. Loops, branches and ``shard_map`` are compiled
    as a whole, and so are the gradients of both programs.

    Args:
        fn: The function in float32, or an `autocast` wrapper with its own options. Or a dict of
            float arrays by name, such as the outputs of hooks of another framework, to compare with
            the dict ``against``.
        *args: The positional arguments of the function.
        policy: A `Policy`, a 16-bit dtype or a jmp string; None for the policy of the wrapper, or
            for the default policy.
        argnums: The positions of arguments, as in ``jax.grad``, if the function returns a scalar:
            the gradients of ``jax.grad(autocast(fn))`` with respect to them are compared as well.
            ``compare(jax.grad(fn), ...)`` has a row for each equation of a backward pass.
        against: Another function of the same arguments, to compare two programs instead of two
            precisions: a sampler with a trainer, decoding with prefill, a batch of 1 with one of 8.
            Both functions run as they are. Values are paired by name: the last value of each
            ``jax.named_scope``, the values named by ``jax.ad_checkpoint.checkpoint_name``, and the
            outputs.
        **kwargs: The keyword arguments of the function.

    Returns:
        A `Comparison`: ``print(comparison)`` shows tables, and ``comparison.rows`` has the worst
        introduced error first. With ``against`` a `ProgramComparison`: its ``first_beyond()``
        returns the first value whose error exceeds a tolerance.

    Raises:
        TypeError: ``fn`` is not callable, an argument is a ``jax.ShapeDtypeStruct``, or ``argnums``
            is given and ``fn`` returns no scalar float.
        ValueError: ``fn`` is an `autocast` wrapper that is disabled, or that has another policy
            than ``policy``; ``argnums`` is out of range; ``against`` is given together with
            ``policy`` or ``argnums``; or two dicts have no name in common.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import Policy, compare
        >>> def f(x):
        ...     with jax.named_scope("difference"):
        ...         y = x @ jnp.eye(8)
        ...         return ((y + 100.0) + -100.0) @ jnp.eye(8)
        >>> policy = Policy("bfloat16", level="compute")  # by default such a sum is in float32
        >>> comparison = compare(f, jnp.full((2, 8), 0.1), policy=policy)
        >>> worst = comparison.rows[0]
        >>> worst.primitive, worst.scope, worst.introduced > 0.5
        ('add', 'difference', True)
    """
    if against is not None:
        options = {"policy": policy, "argnums": argnums}
        if named := [name for name, x in options.items() if x is not None]:
            raise ValueError(
                f"compare runs functions as they are with against=, and got {named[0]}= as well. "
                "Pass autocast(fn, ...) or jax.grad(fn) as the functions."
            )
        check_concrete("compare", (args, kwargs))
        if isinstance(fn, Mapping):
            return compare_arrays(fn, against, args, kwargs)
        return compare_programs(fn, against, args, kwargs)
    wrapper = wrapper_for("compare", fn, policy, args, kwargs)
    check_concrete("compare", (args, kwargs))
    planned = wrapper.planned(*args, **kwargs)
    check_range(argnums, len(args), "the call, which has")
    call, closed = planned.call, planned.closed
    wrt = differentiated(argnums, len(args), call.paths, call.arrays, planned.untrained)
    returned = [aval_of(v) for v in body_of(closed).outvars]
    if wrt and not is_loss(returned):
        raise TypeError(
            f"compare(..., argnums=) differentiates {name_of(fn)}, which must return a scalar "
            f"float first, and returns {', '.join(map(str, returned)) or 'nothing'}. Leave argnums "
            "out, or pass a loss."
        )
    arrays = [on_device(x) for x in call.arrays]

    def run(*arrays: Any) -> Evaluated:
        programs = Program(), Program(planned.plan, Rewriter(planned.planner))
        return Evaluator(ErrorProbe()).start(closed, programs, arrays)

    # On one device each equation is compiled by itself, and equal equations once. On several
    # devices the program is compiled as a whole.
    evaluated = (run if is_on_one_device(closed, arrays) else jax.jit(run))(*arrays)
    outputs = {
        i: distance_and_norms(*each)[0]
        for i, each in enumerate(evaluated.outputs)
        if is_measurable(jax.typeof(each[0]))
    }
    gradients = _gradients(planned, arrays, wrt) if wrt else {}
    readings, *distances = jax.device_get((evaluated.readings, outputs, gradients))
    outputs, gradients = jax.tree.map(lambda x: x.item(), distances)
    return Comparison(
        name=name_of(fn),
        compute_dtype=str(wrapper.policy.compute_dtype),
        rows=equation_rows(measured_equations(closed), readings),
        outputs=outputs,
        gradients=gradient_errors(gradients),
    )


def _gradients(planned: PlannedCall, arrays: Sequence[Any], wrt: Sequence[int]) -> dict[str, Any]:
    """Returns by path the error of each gradient, and the norms of its difference and reference."""

    # The gradients are compiled as a whole, as in training: XLA removes roundings there. Float16
    # gradients that ran equation by equation differed from those of training.
    @jax.jit
    def run(*arrays: Any) -> Any:
        def gradient(program: Callable[..., Any]) -> Any:
            loss = of_positions(program, arrays, wrt)
            return jax.grad(lambda chosen: loss(*chosen)[0])([arrays[i] for i in wrt])

        return gradient(as_function(planned.closed)), gradient(planned.rewritten)

    paths = [planned.call.paths[i] for i in wrt]
    return dict(zip(paths, map(distance_and_norms, *run(*arrays)), strict=True))
