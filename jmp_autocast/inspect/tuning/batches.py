"""The arguments that `tune` runs a function on, and how far two results are apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...arguments import is_array
from ..signature import Signature, split

# XLA would leave out a rounding to 16 bits and back: what overflows there would not be seen.
_EVERY_ROUNDING = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of one call.

    Args:
        args: The arguments.
        signature: What is static in them.
        arrays: Their array leaves, which are traced.
    """

    args: tuple[Any, ...]
    signature: Signature
    arrays: list[Any]

    @property
    def shapes(self) -> str:
        """The types of the arrays and the other leaves, as text."""
        return self.signature.text(self.arrays)


def as_batches(batches: Any) -> list[Batch]:
    """Returns the batches of an iterable.

    Raises:
        TypeError: It is none, or one of them is no tuple of arguments.
        ValueError: There is none.
    """
    fix = "Write a list with a tuple of arguments for each call, such as [(params, x)]."
    if isinstance(batches, str | dict) or is_array(batches) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable of tuples, got {_shown(batches)} of type "
            f"{type(batches).__name__}. {fix}"
        )
    found = []
    for i, args in enumerate(batches):
        if not isinstance(args, tuple):
            raise TypeError(
                f"batches[{i}] must be a tuple of arguments, got {_shown(args)} of type "
                f"{type(args).__name__}. {fix}"
            )
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
            raise TypeError(
                f"batches[{i}] must hold arrays, got a jax.ShapeDtypeStruct. tune runs the "
                "function: pass values that are typical of it."
            )
        found.append(Batch(args, *split(args)))
    if not found:
        raise ValueError(f"batches must hold at least one tuple of arguments, got none. {fix}")
    return found


def different(batches: Sequence[Batch]) -> list[Batch]:
    """Returns the first batch of each signature and shapes: the others have the same plans."""
    found: dict[Any, Batch] = {}
    for batch in batches:
        found.setdefault((batch.signature, batch.shapes), batch)
    return list(found.values())


def outputs_of(fn: Callable[..., Any], batches: Sequence[Batch], argnums: Any) -> list[list[Any]]:
    """Returns the float arrays that a function gives for each batch, with its gradients if asked.

    Args:
        fn: The function.
        batches: The batches.
        argnums: The arguments to differentiate by, None for the function's result alone.
    """
    called = fn if argnums is None else jax.value_and_grad(fn, argnums)

    def run(signature: Signature, *arrays: Any) -> list[Any]:
        leaves = jax.tree.leaves(called(*signature.rebuilt(arrays)))
        return [x for x in leaves if is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)]

    compiled = jax.jit(run, static_argnums=0, compiler_options=_EVERY_ROUNDING)
    return [compiled(batch.signature, *batch.arrays) for batch in batches]


@jax.jit
def error_of(exact: Sequence[Any], found: Sequence[Any]) -> Any:
    """Returns the relative L2 error of the worst array, infinity for what is no longer finite.

    Args:
        exact: The arrays of the float32 program. What is not finite there is left out.
        found: Those of the other program.
    """
    return jnp.stack([_relative(x, y) for x, y in zip(exact, found, strict=True)]).max()


def _relative(exact: Any, found: Any) -> Any:
    dtype = jnp.promote_types(exact.dtype, jnp.float32)
    exact, found = exact.astype(dtype), found.astype(dtype)
    finite = jnp.isfinite(exact)
    exact = jnp.where(finite, exact, 0)
    difference = jnp.where(finite, found - exact, 0)
    # Relative to the largest value: squares of float32 values overflow, and vanish.
    scale = jnp.max(jnp.abs(exact), initial=0)
    nonzero = jnp.where(scale > 0, scale, 1)
    error, norm = _norm(difference / nonzero), _norm(exact / nonzero)
    infinite = jnp.asarray(jnp.inf, error.dtype)
    relative = jnp.where(norm > 0, error / norm, jnp.where(error > 0, infinite, 0))
    return jnp.where(jnp.isfinite(relative), relative, infinite).astype(jnp.float32)


def _norm(x: Any) -> Any:
    return jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x))))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
