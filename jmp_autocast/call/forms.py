"""Forms in which users of other libraries call `autocast`: what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

from ..policies.errors import did_you_mean

LINE = "fn = autocast(fn, compute_dtype=jnp.bfloat16)"
OPTIONS = (
    "compute_dtype",
    "policy",
    "params",
    "output_dtype",
    "enabled",
    "on_unknown",
    "residuals",
    "keep_scopes",
)
# What PyTorch, Keras and Flax call the compute dtype.
_COMPUTE_DTYPE = {"dtype", "fast_dtype", "precision", "param_dtype", "dtype_policy"}
_TORCH = {"device_type", "device", "cache_enabled"}


class NoContext:
    """What `autocast` returns is no context manager: the error says so, and what there is."""

    def __enter__(self) -> NoReturn:
        """Raises TypeError."""
        raise TypeError(
            "autocast is a function transform, as jax.jit is, not a context manager: JAX programs "
            f"are traced, and with autocast(...): has nothing to trace. Write {LINE}, or "
            "@autocast(compute_dtype=jnp.bfloat16) above the function. For a region inside the "
            "function, write with full_precision(): or with compute_precision(dtype):."
        )

    def __exit__(self, *error: object) -> None:
        """Is never reached; the statement ``with`` looks for it first."""


class Decorator(NoContext, functools.partial[Any]):
    """What `autocast` returns without a function."""


def check_form(misplaced: tuple[Any, ...], given: Iterable[str]) -> None:
    """Raises TypeError for arguments that `autocast` does not have.

    Args:
        misplaced: Positional arguments after the function.
        given: The names of keyword arguments; those of options are let pass.
    """
    if misplaced:
        raise TypeError(
            f"autocast takes its options by keyword, got {misplaced[0]!r} by position. Write "
            f"{LINE} for a dtype, or autocast(fn, policy=...) for a policy."
        )
    for name in set(given).difference(OPTIONS):
        fix = did_you_mean(name, OPTIONS)
        if name in _COMPUTE_DTYPE:
            fix = f" The dtype of matmuls is compute_dtype: write {LINE}."
        elif name in _TORCH:
            fix = f" JAX knows the device of each array: write {LINE}."
        known = ", ".join(OPTIONS)
        raise TypeError(f"autocast has no option {name!r}.{fix} Its options are {known}.")


def check_no_class(fn: Any, by: str) -> None:
    """Raises TypeError for a class whose objects are called.

    Args:
        fn: What should be a function.
        by: The public function that takes it.
    """
    if not isinstance(fn, type) or not any("__call__" in vars(base) for base in fn.__mro__):
        return
    # Wrapped, it would run in float32: what is traced is the construction of an object.
    raise TypeError(
        f"{by} takes a function, and {fn.__name__} is a class: calling it makes an object, and "
        "what the object computes later would not be seen. Wrap the function that calls the "
        "object, such as the loss, or decorate the class's __call__. A Flax Linen class is what "
        "jmp_autocast.integrations.linen.autocast takes."
    )
