"""`finalise`: a jaxpr without the primitives of this package, for interpreters of JAX's own.

Our primitives express what JAX's cannot: that a gradient adds up in float32, that a matmul returns
its accumulator in both directions. After differentiation and batching, each of them becomes the
JAX operations of its lowering.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax

from ..compat import (
    JAXPRS,
    AnyJaxpr,
    body_of,
    equation_context,
    fresh_make_jaxpr,
    open_jaxpr,
    variables_in,
)
from ..compat.rebuilding import renamed, with_equations
from ..compat.registration import plain_function


def finalise(jaxpr: AnyJaxpr, *, platform: str | None = None) -> Any:
    """Returns a jaxpr in which all primitives are JAX's own, at any depth.

    For exporters and interpreters that have a table of JAX's primitives. What JAX itself does with
    a program needs no such step, with `jax.export`, `jax.experimental.jet` and
    `jax.experimental.sparse.sparsify` included.

    Evaluated equation by equation, the jaxpr has the values of the given one, bit for bit; on CPUs
    with kernels for bfloat16 a float32 result of a product differs in its last bits. Call it
    last: rules of ``custom_jvp`` and ``custom_vjp`` functions are Python, and stay as they are, and
    the gradients of a jaxpr that was finalised add up in 16 bits, where those of the given one add
    up in float32.

    Args:
        jaxpr: A jaxpr, closed or open, as `jax.make_jaxpr` returns it.
        platform: The platform that it is for: ``"cpu"``, ``"gpu"`` or ``"tpu"``. On
            CPUs XLA has no matmul of 16-bit operands with a float32 result in all layouts, so that
            the operands are widened there. None for the default backend.

    Returns:
        The jaxpr, of the same inputs and outputs; the given one, if no primitive in it is ours.

    Raises:
        TypeError: ``jaxpr`` is no jaxpr, such as a function.
        ValueError: ``platform`` is another name.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import autocast, finalise
        >>> loss = autocast(lambda w, x: jnp.sum(x @ w), jnp.bfloat16)
        >>> gradient = jax.make_jaxpr(jax.grad(loss))(jnp.ones((8, 2)), jnp.ones((3, 8)))
        >>> names = lambda jaxpr: {eqn.primitive.name for eqn in jaxpr.eqns}
        >>> "accumulate" in names(gradient), "accumulate" in names(finalise(gradient))
        (True, False)
    """
    if not isinstance(jaxpr, JAXPRS):
        raise TypeError(
            f"finalise takes a jaxpr, not a value of type {type(jaxpr).__name__}. Trace the "
            "function first: finalise(jax.make_jaxpr(fn)(*args))."
        )
    if platform not in (None, "cpu", "gpu", "tpu", "cuda", "rocm"):
        raise ValueError(
            f"platform={platform!r} must be 'cpu', 'gpu' or 'tpu'. Leave it out for the default "
            "backend."
        )
    return _finalised(jaxpr, platform or jax.default_backend(), {})


def _finalised(jaxpr: AnyJaxpr, platform: str, made: dict[int, tuple[Any, Any]]) -> Any:
    """Returns a jaxpr for a platform, memoized: equations that share one still share it."""
    if id(jaxpr) in made:
        return made[id(jaxpr)][1]
    finalised = functools.partial(_finalised, platform=platform, made=made)
    body, eqns = body_of(jaxpr), []
    atoms: dict[Any, Any] = {}  # the replacements of our equations' results
    for eqn in body.eqns:
        operands = renamed(eqn.invars, atoms)
        if (function := plain_function(eqn.primitive, eqn.params, platform)) is None:
            params = _with_jaxprs(eqn.params, finalised)
            is_same = params is eqn.params and atoms.keys().isdisjoint(variables_in(eqn.invars))
            eqns.append(eqn if is_same else eqn.replace(invars=operands, params=params))
            continue
        with equation_context(eqn):
            traced = fresh_make_jaxpr(function, *(v.aval for v in eqn.invars))
        plain = open_jaxpr(finalised(traced))
        inside = dict(zip(plain.invars, operands, strict=True))
        info = eqn.source_info
        for e in plain.eqns:
            eqns.append(e.replace(invars=renamed(e.invars, inside), source_info=info))
        atoms.update(zip(eqn.outvars, renamed(plain.outvars, inside), strict=True))
    # The given jaxpr is stored, too, so that no other jaxpr can get its id.
    made[id(jaxpr)] = jaxpr, with_equations(jaxpr, eqns, renamed(body.outvars, atoms))
    return made[id(jaxpr)][1]


def _with_jaxprs(params: Any, new: Callable[[Any], Any]) -> Any:
    """Returns parameters of an equation with other jaxprs, for any primitive.

    Args:
        params: The parameters, or one of them.
        new: From a jaxpr, open or closed, to one with inputs and outputs of the same types.

    Returns:
        The parameters; the given object, where all jaxprs in it stay.
    """
    if isinstance(params, JAXPRS):
        return new(params)
    if isinstance(params, dict):
        values = {name: _with_jaxprs(x, new) for name, x in params.items()}
        return values if any(values[name] is not x for name, x in params.items()) else params
    if isinstance(params, tuple | list):
        items = [_with_jaxprs(x, new) for x in params]
        if all(map(operator.is_, items, params)):
            return params
        make: Any = getattr(params, "_make", type(params))  # a named tuple takes items one by one
        return make(items)
    return params
