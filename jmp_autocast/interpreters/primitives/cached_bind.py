"""Binding an ordinary primitive so that JAX differentiates equal ones once.

Under ``grad`` JAX linearizes each bound primitive by tracing its derivative. ``jnp`` functions are
jitted and inlined: their linearization is cached, and a transformer has some hundred different ones
among thousands. Equations bound one by one had no such cache and took twice as long to trace, so
they are bound through an inlined jit as well. It leaves no trace in the jaxpr.

Without differentiation the inlined jit is a detour: 18 microseconds a product, 8 without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from ...policies import DEFAULT_RULES, CastPolicy
from ..compat import Tracer, bind, inlined, is_staged
from ..compat.keyed import Keyed

_CACHED = frozenset(n for n, rule in DEFAULT_RULES.items() if rule is not CastPolicy.KEEP)

_SCALARS = (bool, int, float, complex, np.generic)


def bind_cached(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Binds a primitive.

    Args:
        primitive: The primitive.
        operands: Its operands: arrays, tracers, or scalars, which stay literals.
        params: Its parameters.

    Returns:
        What ``primitive.bind`` returns.
    """
    if not any(isinstance(x, Tracer) for x in operands):
        # JAX casts concrete arrays with NumPy, which warns of intended infinities.
        with np.errstate(over="ignore"):
            return bind(primitive, operands, params)
    if primitive.name not in _CACHED or not any(map(is_derived, operands)):
        return bind(primitive, operands, params)
    # A scalar operand stays a literal in the jaxpr; as an argument of the inlined function it would
    # become an array constant.
    scalars = tuple((i, _scalar(x)) for i, x in enumerate(operands) if isinstance(x, _SCALARS))
    # JAX's cache needs a hash of the parameters. Printed jaxprs distinguish an axis of NumPy's
    # integer type, as `vmap` makes them, from Python's; their hashes are equal.
    kinds = tuple([type(x[0]) if type(x) is tuple and x else None for x in params.values()])
    function = _bound_primitive(primitive, tuple(params.items()), kinds, scalars)
    return function(*[x for x in operands if not isinstance(x, _SCALARS)])


def cast(x: Any, dtype: np.dtype) -> Any:
    """Casts an array."""
    return _cast_to(dtype)(x)


def with_cached_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arrays that JAX differentiates once for all calls of equal types.

    Args:
        function: The function, made once for many calls.
    """
    inline = inlined(function)

    def call(*xs: Any) -> Any:
        return (inline if any(map(is_derived, xs)) else function)(*xs)

    return call


def is_derived(x: Any) -> bool:
    """Whether JAX may be differentiating or mapping at the current point."""
    return isinstance(x, Tracer) and not is_staged(x)


def _scalar(value: Any) -> Keyed:
    """Returns a scalar as a cache key: two are equal if they are the same bits of the same type."""
    bits = value.tobytes() if isinstance(value, np.generic) else repr(value)
    return Keyed((type(value), bits), value)


@functools.lru_cache(maxsize=4096)
def _bound_primitive(
    primitive: Any,
    params: tuple[tuple[str, Any], ...],
    kinds: tuple[type | None, ...],
    scalars: tuple[tuple[int, Keyed], ...],
) -> Callable[..., Any]:
    def call(*arrays: Any) -> Any:
        operands = list(arrays)
        for i, scalar in scalars:
            operands.insert(i, scalar.of)
        return bind(primitive, operands, dict(params))

    return inlined(call)


@functools.lru_cache(maxsize=16)
def _cast_to(dtype: np.dtype) -> Callable[[Any], Any]:
    return with_cached_derivative(functools.partial(lax.convert_element_type, new_dtype=dtype))
