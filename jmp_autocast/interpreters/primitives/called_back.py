"""Functions that a primitive calls back: those of an iterative solver, and of its derivative.

The planner leaves them as the program declares them, so reports of a plan have no rows for what is
inside, and measurements do not look into them. In an island, where everything has another dtype,
they are traced for that dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..compat import Jaxpr, JaxprEqn
from .structure import Body


def functions_of(eqn: JaxprEqn) -> tuple[Body, ...]:
    """Returns the functions that an equation calls back; () for one that calls back none.

    Those of ``custom_linear_solve`` take constants of their own, and an array like the right-hand
    side. One of them returns the results; the others, which the derivative calls, return none.

    Args:
        eqn: The equation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> solve = jax.make_jaxpr(
        ...     lambda b: jax.lax.custom_linear_solve(lambda x: 2 * x, b, lambda matvec, b: b / 2)
        ... )(jnp.ones(3))
        >>> [body.results for body in functions_of(solve.eqns[-1])]
        [(None,), (0,)]
    """
    if eqn.primitive.name != "custom_linear_solve":
        return ()
    jaxprs, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    ends = list(itertools.accumulate(lengths))
    right = range(ends[-1], len(eqn.invars))
    found = []
    for jaxpr, length, end in zip(jaxprs, lengths, ends, strict=True):
        if jaxpr is not None:
            solves = jaxpr is jaxprs.solve
            count = len(jaxpr.out_avals)
            results = tuple(range(count)) if solves else (None,) * count
            found.append(Body(jaxpr, (*range(end - length, end), *right), results))
    return tuple(found)


def with_functions(eqn: JaxprEqn, jaxprs: Sequence[Jaxpr]) -> dict[str, Any]:
    """Returns the parameters that bind an equation with other functions.

    Args:
        eqn: The equation.
        jaxprs: A closed jaxpr in place of each of `functions_of`.
    """
    new, old = iter(jaxprs), eqn.params["jaxprs"]
    named = {name: next(new) for name in old._fields if getattr(old, name) is not None}
    return {**eqn.params, "jaxprs": old._replace(**named)}
