"""`finalise`: replaces the package's primitives in a jaxpr by JAX's own, for other interpreters.

The package's primitives express what JAX's primitives cannot: a gradient that adds up in float32,
or a matmul that returns its accumulator in the forward and backward pass. After differentiation and
batching, each of them can be replaced by the JAX operations of its lowering.
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

    Exporters and interpreters that have a table of JAX's primitives need this step. JAX itself does
    not, nor do `jax.export`, `jax.experimental.jet` and `jax.experimental.sparse.sparsify`.

    Evaluated equation by equation, the result computes the values of ``jaxpr`` bit for bit. The
    exception is a float32 result of a product on CPUs with kernels for bfloat16: it differs in its
    last bits. Call `finalise` last, after differentiation: the gradients of a finalised jaxpr add
    up in 16 bits instead of float32. Rules of ``custom_jvp`` and ``custom_vjp`` functions are
    Python functions and do not change.

    Args:
        jaxpr: A jaxpr, closed or open, as `jax.make_jaxpr` returns it.
        platform: The platform of the result: ``"cpu"``, ``"gpu"`` or ``"tpu"``; None for the
            default backend. For CPUs the operands of a matmul are widened, because XLA lacks
            matmuls of 16-bit operands with a float32 result in some layouts.

    Returns:
        A jaxpr with the same inputs and outputs; ``jaxpr`` itself if it holds none of the package's
        primitives.

    Raises:
        TypeError: ``jaxpr`` is not a jaxpr but, for example, a function.
        ValueError: ``platform`` is an unknown name.

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
    """Returns a finalised jaxpr, memoized: equations that share a jaxpr share the result."""
    if id(jaxpr) in made:
        return made[id(jaxpr)][1]
    finalised = functools.partial(_finalised, platform=platform, made=made)
    body, eqns = body_of(jaxpr), []
    atoms: dict[Any, Any] = {}  # maps each replaced result to its new variable or literal
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
    """Replaces the jaxprs in the parameters of an equation of any primitive.

    Args:
        params: The parameters, or one of them.
        new: Returns a jaxpr of the same types for a jaxpr, open or closed.

    Returns:
        The parameters; the given object if no jaxpr in it changes.
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
        make: Any = getattr(params, "_make", type(params))  # a named tuple takes separate arguments
        return make(items)
    return params
