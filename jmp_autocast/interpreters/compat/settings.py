"""The settings that a trace depends on; JAX has no public name for them together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from .kernel_calls import KERNEL_DTYPE, kernels_in
from .private_names import private


def trace_context() -> Hashable:
    """Returns the settings and axis names that a trace depends on, as `jax.jit` compares them.

    If JAX offers no key, the result is equal to nothing, so that nothing is reused.
    """
    context = private("jax._src.config.trace_context")
    return object() if context is None else context()


def backends_are_set_up() -> bool:
    """Returns whether JAX has opened a backend; `jax.distributed` has to be set up before."""
    initialized = private("jax._src.xla_bridge.backends_are_initialized")
    return initialized is not None and initialized()


# The flags are no attributes to a type checker.
_CONFIG: Any = jax.config


def jit_is_disabled() -> bool:
    """Returns whether `jax.disable_jit` is in force."""
    return bool(_CONFIG.jax_disable_jit)


_AROUND: Any = jax.make_user_context(None)
"""The default precision of products around the outermost function that is traced without it.

A user context is part of the key of JAX's caches.
"""


def default_precision() -> str | None:
    """Returns JAX's default precision of products, of the context around all that is traced."""
    return _CONFIG.jax_default_matmul_precision or _AROUND.value


@contextlib.contextmanager
def without_default_precision() -> Iterator[None]:
    """Traces products without JAX's default precision, with the program's own precisions only.

    JAX writes its default (the flag, or a context around the call) into each product, where it
    looks the same as a precision of the user's.
    """
    around = default_precision()
    with _AROUND(around), jax.default_matmul_precision(None):
        yield


def with_default_precision() -> contextlib.AbstractContextManager[Any]:
    """Returns a context with JAX's default precision, for equations without a plan."""
    around = None if _CONFIG.jax_default_matmul_precision else _AROUND.value
    return contextlib.nullcontext() if around is None else jax.default_matmul_precision(around)


def is_checked() -> bool:
    """Returns whether JAX looks for NaNs or infinities after each operation that it runs."""
    return _CONFIG.jax_debug_nans or _CONFIG.jax_debug_infs


def without_nan_checks() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which JAX looks for no NaN, for what only casts or moves elements.

    A constant may be NaN, as in ``jnp.where(is_bad, nan, x)``. JAX compiles it into the function
    around it and checks what that returns; here its broadcast may be an operation of its own.
    """
    return jax.debug_nans(False) if is_checked() else contextlib.nullcontext()


def has_float64() -> bool:
    """Returns whether JAX makes float64 arrays now."""
    return bool(_CONFIG.jax_enable_x64)


_WIDE = frozenset(map(np.dtype, ("float64", "int64", "uint64", "complex128")))


def float64_for(avals: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which JAX can make arrays of these types, 64 bits included.

    Part of a program may have been traced in ``jax.enable_x64(True)``, and be bound outside.

    Args:
        avals: Types of operands and results.
    """
    if has_float64() or not any(getattr(a, "dtype", None) in _WIDE for a in avals):
        return contextlib.nullcontext()
    return jax.enable_x64(True)


def in_settings_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with today's settings of x64 and kernels, and no default precision.

    JAX calls the rule of a custom function when it differentiates, which may be much later. A
    precision in the rule itself is the user's; the flag is not.
    """
    enabled, kernel_dtype = has_float64(), KERNEL_DTYPE.value

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with contextlib.ExitStack() as settings:
            settings.enter_context(kernels_in(kernel_dtype))
            if has_float64() != enabled:
                settings.enter_context(jax.enable_x64(enabled))
            if default_precision() is not None:
                settings.enter_context(without_default_precision())
            return function(*args)

    return call
