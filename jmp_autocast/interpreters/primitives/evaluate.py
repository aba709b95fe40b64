"""The only loop of the package that runs the equations of a jaxpr.

Its callers (the rewriter, measurements, taps of cotangents, the lowering of a contraction) differ
in how they run one equation and represent a value. They pass functions for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from ..compat import AnyJaxpr, Literal, body_of, bound, consts_of, equation_context, literal_value

V = TypeVar("V")


def evaluate(
    jaxpr: AnyJaxpr,
    consts: Sequence[V],
    args: Sequence[V],
    literal: Callable[[Any], V],
    step: Callable[[int, Any, list[V]], Sequence[V]],
    context: Callable[[Any], AbstractContextManager[Any]] = equation_context,
) -> list[V]:
    """Runs the equations of a jaxpr in program order, each by a function of the caller.

    Args:
        jaxpr: An open or closed jaxpr.
        consts: The caller's representation of each constant.
        args: The caller's representation of each input.
        literal: Returns the representation of a literal of the jaxpr.
        step: Takes the index of an equation, the equation and its operands; returns its results.
        context: Returns the context of an equation's step. By default the step runs in the scopes,
            at the source line and under the settings of the equation, so that errors, profiles and
            HLO metadata point at the user's program.

    Returns:
        The representation of each output.
    """
    body = body_of(jaxpr)
    env = dict(zip(body.constvars, consts, strict=True))
    env.update(zip(body.invars, args, strict=True))
    # `last_use` holds the index of each variable's last consumer; for outputs, the equation count.
    reads = (*(eqn.invars for eqn in body.eqns), body.outvars)
    last_use = {v: i for i, atoms in enumerate(reads) for v in atoms if not isinstance(v, Literal)}
    for i, eqn in enumerate(body.eqns):
        with context(eqn):
            # The literals are read inside of the context, which decides whether JAX makes 64-bit
            # numbers of them.
            operands = [literal(v) if isinstance(v, Literal) else env[v] for v in eqn.invars]
            results = step(i, eqn, operands)
        # A value is dropped after its last use. Outside of `jit`, this frees the memory of an
        # array.
        for v in eqn.invars:
            if not isinstance(v, Literal) and last_use[v] == i:
                env.pop(v, None)
        for v, x in zip(eqn.outvars, results, strict=True):
            if v in last_use:
                env[v] = x
    return [literal(v) if isinstance(v, Literal) else env[v] for v in body.outvars]


def as_function(
    closed: AnyJaxpr, around: Callable[[Any], AbstractContextManager[Any]] = lambda _: nullcontext()
) -> Callable[..., list[Any]]:
    """Returns a function that runs a closed jaxpr, each equation under the settings of its trace.

    JAX's own function ignores ``jax.enable_x64``, and would run 64-bit equations in 32 bits.

    Args:
        closed: The closed jaxpr.
        around: Returns an additional context for each equation.
    """

    def step(_: int, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        with around(eqn):
            return bound(eqn, operands)

    return lambda *args: evaluate(closed, consts_of(closed), args, literal_value, step)


def of_positions(
    function: Callable[..., Any], given: Sequence[Any], positions: Sequence[int]
) -> Callable[..., Any]:
    """Fixes all arguments of a function except those at some positions.

    Args:
        function: The function.
        given: All of its arguments.
        positions: The positions of the arguments that the returned function takes.
    """

    def of_some(*xs: Any) -> Any:
        full = list(given)
        for i, x in zip(positions, xs, strict=True):
            full[i] = x
        return function(*full)

    return of_some
