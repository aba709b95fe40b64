"""Calls the function that a plan runs in place of an equation: a user's, or the package's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..compat import JaxprEqn, aval_of, mark_frames
from ..plan.data import Emit, EquationPlan
from .values import Scalar, read

mark_frames(__file__)


def emitted(eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]) -> Sequence[Any]:
    """Calls a function in place of an equation, and checks its results.

    Args:
        eqn: The equation.
        plan: Its plan, whose action is `Emit`.
        operands: Its operands, each a `Value` or `Scalar`.

    Returns:
        The results, as arrays.

    Raises:
        TypeError: The function returned arrays of unexpected number, shapes or dtypes.
    """
    action = plan.action
    assert isinstance(action, Emit)
    dtypes = [None if i in action.as_they_are else d for i, d in enumerate(plan.operands)]
    read_so = dataclasses.replace(plan, operands=tuple(dtypes))
    arrays = [
        jnp.asarray(x, aval_of(v).dtype) if isinstance(value, Scalar) and x.dtype is None else x
        for x, value, v in zip(read(read_so, operands), operands, eqn.invars, strict=True)
    ]
    copies = [operands[i].copy(key) for i, key in action.copies]
    # In the ambient trace, JAX differentiates, batches and shards the equations of the function.
    out = action.function(*arrays, *copies)
    results = list(out) if isinstance(out, tuple | list) else [out]
    pairs = zip(map(aval_of, eqn.outvars), plan.results, strict=True)
    expected = [(aval.shape, state.dtype or aval.dtype) for aval, state in pairs]
    found = [(jnp.shape(x), jnp.result_type(x)) for x in results]
    if found != expected:
        raise TypeError(
            f"{action.name}, which a rule emits in place of {eqn.primitive.name}, must "
            f"return {_described(expected)}, got {_described(found)}. "
            "Cast its result, or tell the dtype by Decision(output_dtype=...)."
        )
    return [jnp.asarray(x) for x in results]


def _described(types: Any) -> str:
    return ", ".join(f"{dtype.name}[{','.join(map(str, shape))}]" for shape, dtype in types)
