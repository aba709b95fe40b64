"""The settings of JAX that a trace depends on."""

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
    """Returns the settings and axis names that a trace depends on, as a key of JAX's caches.

    If JAX has no such key, the result equals no other object, so that no cached trace is reused.
    """
    context = private("jax._src.config.trace_context")
    return object() if context is None else context()


def backends_are_set_up() -> bool:
    """Returns whether JAX has opened a backend.

    From then on, `jax.distributed` can no longer be initialized.
    """
    initialized = private("jax._src.xla_bridge.backends_are_initialized")
    return initialized is not None and initialized()


# A type checker does not know the flags as attributes.
_CONFIG: Any = jax.config


def jit_is_disabled() -> bool:
    """Returns whether `jax.disable_jit` is in force."""
    return bool(_CONFIG.jax_disable_jit)


_AROUND: Any = jax.make_user_context(None)
"""The default precision outside of the outermost `without_default_precision`.

A user context is part of the key of JAX's caches.
"""


def default_precision() -> str | None:
    """Returns the default precision of products that the user set, by the flag or a context."""
    return _CONFIG.jax_default_matmul_precision or _AROUND.value


@contextlib.contextmanager
def without_default_precision() -> Iterator[None]:
    """Returns a context in which only the program's own precisions are written into products.

    JAX writes its default precision (the flag, or a context around the call) into each traced
    product, where it cannot be told from the precision that a product declares.
    """
    around = default_precision()
    with _AROUND(around), jax.default_matmul_precision(None):
        yield


def with_default_precision() -> contextlib.AbstractContextManager[Any]:
    """Returns a context with the user's default precision, for equations without a plan."""
    around = None if _CONFIG.jax_default_matmul_precision else _AROUND.value
    return contextlib.nullcontext() if around is None else jax.default_matmul_precision(around)


def is_checked() -> bool:
    """Returns whether JAX looks for NaNs or infinities after each operation that it runs."""
    return _CONFIG.jax_debug_nans or _CONFIG.jax_debug_infs


def without_nan_checks() -> contextlib.AbstractContextManager[Any]:
    """Returns a context without JAX's NaN checks, for operations that only cast or move elements.

    A constant may be NaN, as in ``jnp.where(is_bad, nan, x)``. JAX compiles the constant into the
    surrounding function and checks only that function's results. In the package, the broadcast of
    the constant may run as an operation of its own, which JAX would check.
    """
    return jax.debug_nans(False) if is_checked() else contextlib.nullcontext()


def has_float64() -> bool:
    """Returns whether JAX's current settings allow float64 arrays."""
    return bool(_CONFIG.jax_enable_x64)


_WIDE = frozenset(map(np.dtype, ("float64", "int64", "uint64", "complex128")))


def float64_for(avals: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which JAX can create arrays of these types, with 64-bit types enabled.

    A part of a program may be traced inside of ``jax.enable_x64(True)`` and bound outside of it.

    Args:
        avals: The types of operands and results.
    """
    if has_float64() or not any(getattr(a, "dtype", None) in _WIDE for a in avals):
        return contextlib.nullcontext()
    return jax.enable_x64(True)


def in_settings_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs with the current x64 and kernel settings.

    JAX calls the rule of a custom function when it differentiates, which may be much later. If a
    default precision is set at that later time, the rule runs without it, and keeps the precisions
    that the user wrote in the rule.
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
