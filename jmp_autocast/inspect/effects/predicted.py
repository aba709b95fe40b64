"""Predicts the effect of running each operation in 16 bits, from a backward pass in float32.

To first order, an operation changes a scalar by its rounding errors times its cotangents, summed
over the elements. If the function returns a loss, the scalar is the loss. Otherwise the scalar is
the sum of all elements of the results with random signs, after each result is divided by its norm:
the mean square of its change is then the square of the relative error of the results.

A site is an equation whose rounding changes the results (see `sites`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...backend import EVERY_ROUNDING
from ...interpreters.compat import aval_of, body_of, fresh_make_jaxpr
from ...interpreters.primitives.evaluate import as_function
from ..calls import is_loss
from .sites import Operation, Site, sites_of
from .walk import NUMBERS, Tapped


class Effect(NamedTuple):
    """The effect of rounding one operation to 16 bits, in the units of the loss.

    Args:
        change: The change of the loss to first order; without a loss the same as ``spread``.
        spread: The root of the sum of squares of the changes that the single elements cause. It is
            the expected size of the change if errors are independent. Without a loss it is the
            relative error.
        in_range: Whether the dtype can represent the operation's values, and its cotangents.
    """

    change: float
    spread: float
    in_range: bool

    @property
    def size(self) -> float:
        """An estimate of the largest change; infinite if values are out of the dtype's range."""
        return max(abs(self.change), self.spread) if self.in_range else math.inf


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward and backward pass that measures the effects of operations.

    It is traced for arguments of fixed shapes and dtypes.

    Args:
        operations: The measured operations.
        sites: The sites with these operations.
        run: Takes the arrays, and returns `NUMBERS` numbers for each site.
        has_loss: Whether the first result is a loss.
        gradients: Whether the cotangents must be in the dtype's range, as the values must.
        error: The error of JAX if it cannot differentiate the function, else ``""``.
    """

    operations: frozenset[Operation]
    sites: Sequence[Site]
    run: Callable[..., Any]
    has_loss: bool
    gradients: bool
    error: str = ""

    def effects(self, arrays: Sequence[Any]) -> dict[Operation, Effect]:
        """Returns the effect of each operation that a cotangent reaches."""
        sums = {operation: np.zeros(NUMBERS) for operation in self.operations}
        if self.sites:
            for site, numbers in zip(self.sites, np.asarray(self.run(*arrays)), strict=True):
                for operation in site.operations & self.operations:
                    sums[operation] += numbers
        found = {}
        for operation, (change, square, lost, off, size) in sums.items():
            if size:
                # Rounding changes cotangents by far less than half of their size. If they change
                # by more, they underflow or overflow.
                in_range = not lost and not (self.gradients and off > size / 2)
                spread = math.sqrt(square)
                found[operation] = Effect(change if self.has_loss else spread, spread, in_range)
        return found


def pass_of(
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    operations: Iterable[Operation],
    dtype: np.dtype,
    gradients: bool,
) -> Pass:
    """Returns the pass that measures the effects of operations.

    Args:
        fn: The function in float32, from arrays to arrays.
        arrays: Its arguments.
        operations: The operations to measure.
        dtype: The dtype that they are rounded to.
        gradients: Whether the cotangents must be in the dtype's range, as the values must. If so, a
            scalar first result is always the loss.
    """
    closed = fresh_make_jaxpr(fn, *arrays)
    avals = [aval_of(v) for v in body_of(closed).outvars]
    floats = [k for k, x in enumerate(avals) if jnp.issubdtype(x.dtype, jnp.floating)]
    has_loss = is_loss(avals) and (gradients or len(floats) == 1)
    live = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in arrays]
    wanted = frozenset(operations)
    tree, _ = sites_of(closed, live, lambda site: not wanted.isdisjoint(site.operations))

    def run(*arrays: Any) -> Any:
        def scalar(zeros: Any) -> Any:
            outputs = Tapped(dtype).run(closed, arrays, zeros)
            return outputs[0] if has_loss else _random_sum([outputs[k] for k in floats])

        zeros = jax.tree.map(lambda site: jnp.zeros((*site.loops, NUMBERS)), tree)
        found = jax.tree.leaves(jax.grad(scalar)(zeros))
        return jnp.stack([x.reshape(-1, NUMBERS).sum(0) for x in found])

    found = Pass(wanted, jax.tree.leaves(tree), run, has_loss, gradients)
    if not found.sites:
        return found
    try:
        traced = as_function(fresh_make_jaxpr(run, *arrays))
    except Exception as error:  # JAX, or a derivative rule of the user, may raise anything
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return dataclasses.replace(found, sites=(), error=text)
    first = lambda *arrays: traced(*arrays)[0]  # noqa: E731
    return dataclasses.replace(found, run=jax.jit(first, compiler_options=EVERY_ROUNDING))


def _random_sum(arrays: Sequence[Any]) -> Any:
    """Divides each array by its norm, and returns the sum of all elements with random signs."""
    keys = jax.random.split(jax.random.key(0), max(len(arrays), 1))
    total = jnp.float32(0)
    for x, key in zip(arrays, keys, strict=False):
        x = jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32)
        norm = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(x * x)))
        signs = jax.random.rademacher(key, x.shape, jnp.float32)
        total += jnp.sum(x * signs) / jnp.where(norm > 0, norm, 1.0)
    return total
