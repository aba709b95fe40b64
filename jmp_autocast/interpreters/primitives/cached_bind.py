"""Binds a primitive so that JAX differentiates equal equations only once.

Under ``grad``, JAX linearizes each bound primitive by tracing its derivative. For ``jnp``
functions, which are jitted and inlined, JAX caches the linearization; a transformer has some
hundred different ones among thousands of equations. Equations bound one by one have no such cache
and took twice as long to trace. So this module binds them through an inlined jit as well, which
leaves no equation of its own in the jaxpr.

Without differentiation, the inlined jit only costs time: 18 microseconds a product instead of 8.
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
        # JAX casts concrete arrays with NumPy, which warns if a cast overflows to infinity. Such a
        # cast is intended here, so the warning is turned off.
        with np.errstate(over="ignore"):
            return bind(primitive, operands, params)
    if primitive.name not in _CACHED or not any(map(is_derived, operands)):
        return bind(primitive, operands, params)
    # A scalar operand stays a literal in the jaxpr. As an argument of the inlined function, it
    # would become an array constant.
    scalars = tuple((i, _scalar(x)) for i, x in enumerate(operands) if isinstance(x, _SCALARS))
    # JAX's cache needs a hash of the parameters. `vmap` creates axes of NumPy's integer type, whose
    # hashes equal those of Python's integers. The key holds the types of axes, too, because printed
    # jaxprs show them.
    kinds = tuple([type(x[0]) if type(x) is tuple and x else None for x in params.values()])
    function = _bound_primitive(primitive, tuple(params.items()), kinds, scalars)
    return function(*[x for x in operands if not isinstance(x, _SCALARS)])


def cast(x: Any, dtype: np.dtype) -> Any:
    """Casts an array."""
    return _cast_to(dtype)(x)


def with_cached_derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of arrays so that JAX differentiates it once for all calls of equal types.

    Args:
        function: The function, which must be one object for all these calls.
    """
    inline = inlined(function)

    def call(*xs: Any) -> Any:
        return (inline if any(map(is_derived, xs)) else function)(*xs)

    return call


def is_derived(x: Any) -> bool:
    """Returns whether JAX may be differentiating or batching an array."""
    return isinstance(x, Tracer) and not is_staged(x)


def _scalar(value: Any) -> Keyed:
    """Returns a scalar as a cache key, equal for the same bits of the same type."""
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
