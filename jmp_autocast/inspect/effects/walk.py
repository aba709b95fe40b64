"""Runs a program, and measures in its backward pass how rounding each site changes a scalar.

A site is an equation whose rounding changes the results (see `sites`). Its results pass through an
identity function whose derivative rule gets their cotangents. The rule returns the measured numbers
as the gradient of another operand of the identity, an array of zeros. So the backward pass keeps
only a few numbers per site, and a loop returns these numbers for each iteration. Rounding errors
are computed in the backward pass, so that the forward pass stores none.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ...interpreters import compat
from ...interpreters.compat import AnyJaxpr, JaxprEqn, Literal, bound, literal_value
from ...interpreters.primitives import structure
from ...interpreters.primitives.evaluate import evaluate
from ...policies import CONTRACTIONS
from .sites import Tree

NUMBERS = 5
"""A site has five numbers: the change of the scalar to first order; the sum over the elements of
the squared change that each element causes; the count of elements that are finite only in float32;
the sum of the magnitudes of the cotangents' rounding errors; the sum of the cotangents' magnitudes.
"""


class Tapped:
    """Runs a program, and measures the effect of rounding each site to a dtype."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype

    def run(self, jaxpr: AnyJaxpr, arrays: Sequence[Any], zeros: Tree) -> list[Any]:
        """Returns the outputs of a jaxpr.

        Args:
            jaxpr: The jaxpr.
            arrays: Its inputs.
            zeros: An array of zeros for each site, of shape ``(*loops, NUMBERS)``. Its gradient is
                the numbers of the site.
        """

        def step(i: int, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            found = zeros.get(i)
            if isinstance(found, list):
                return self._inside(eqn, operands, found)
            if found is not None:
                return self._site(eqn, operands, found)
            if eqn.primitive.name == "while":  # `while` has no reverse-mode derivative
                operands = [lax.stop_gradient(x) if _is_float(x) else x for x in operands]
            return bound(eqn, operands)

        return evaluate(jaxpr, compat.consts_of(jaxpr), arrays, literal_value, step)

    def _site(self, eqn: JaxprEqn, operands: Sequence[Any], zeros: Any) -> list[Any]:
        results = bound(eqn, operands)
        floats = [k for k, x in enumerate(results) if _is_float(x)]
        values = [results[k] for k in floats]
        residuals: list[Any] = values
        # JAX keeps the operands of a product for its derivative anyway, so they are the residuals.
        if _is_product(eqn):
            pairs = zip(eqn.invars, operands, strict=True)
            residuals = [x for v, x in pairs if not isinstance(v, Literal)]
        # In a `shard_map` each device measures its own part of the site.
        axes = frozenset().union(*map(compat.varying_axes, values))
        tapped = _tap(eqn, self._dtype)(compat.device_varying(zeros, axes), residuals, values)
        for k, x in zip(floats, tapped, strict=True):
            results[k] = x
        return results

    def _inside(self, eqn: JaxprEqn, operands: list[Any], zeros: list[Tree]) -> Sequence[Any]:
        found = structure.bodies(eqn)
        if eqn.primitive.name == "cond":
            branches = [
                lambda zeros, args, k=k: self.run(found[k].jaxpr, args, zeros[k])
                for k in range(len(found))
            ]
            return lax.switch(operands[0], branches, zeros, operands[1:])
        (body,), (tree,) = found, zeros
        if eqn.primitive.name == "scan":
            fixed, carries = operands[: body.fixed], len(body.carries)
            start, scanned = operands[body.fixed :][:carries], operands[body.fixed :][carries:]

            def step(carry: list[Any], slices: Any) -> tuple[list[Any], list[Any]]:
                xs, of_iteration = slices
                outputs = self.run(body.jaxpr, [*fixed, *carry, *xs], of_iteration)
                return outputs[:carries], outputs[carries:]

            direction = structure.scan_direction(eqn)
            last, stacked = lax.scan(step, start, (scanned, tree), **direction)
            return [*last, *stacked]
        if eqn.primitive.name == "shard_map":
            options = structure.shard_map_options(eqn)
            # The zeros are replicated, so their gradient is the sum over devices.
            options["in_specs"] = options["in_specs"], PartitionSpec()
            inside = lambda args, zeros: tuple(self.run(body.jaxpr, args, zeros))  # noqa: E731
            return list(jax.shard_map(inside, **options)(tuple(operands), tree))
        if structure.runs_again(eqn) and eqn.primitive.name != "remat_opt":
            return self._checkpoint(eqn, body.jaxpr, operands, tree)
        return self.run(body.jaxpr, operands, tree)

    def _checkpoint(
        self, eqn: JaxprEqn, jaxpr: AnyJaxpr, operands: list[Any], zeros: Tree
    ) -> Sequence[Any]:
        """Binds the user's checkpoint, with its policy, to a body that measures its sites."""
        leaves, tree = jax.tree.flatten(zeros)
        count = len(operands)

        def run(*arrays: Any) -> list[Any]:
            return self.run(jaxpr, arrays[:count], jax.tree.unflatten(tree, arrays[count:]))

        closed = compat.fresh_make_jaxpr(run, *map(jax.typeof, (*operands, *leaves)))
        copies = [structure.Copy(0, leaf) for leaf in leaves]
        args, params = structure.rebound(eqn, operands, [closed], [copies])
        return eqn.primitive.bind(*args, **params)


def _tap(eqn: JaxprEqn, dtype: np.dtype) -> Any:
    """Returns an identity for a site's results whose backward pass measures the site.

    The operands of the identity are the zeros, the residuals and the float results. The identity
    must not close over arrays, because a checkpoint could not recompute them.
    """

    def operands_of(residuals: Sequence[Any]) -> list[Any]:
        given = iter(residuals)
        return [literal_value(v) if isinstance(v, Literal) else next(given) for v in eqn.invars]

    @jax.custom_vjp
    def tap(zeros: Any, residuals: Sequence[Any], values: list[Any]) -> list[Any]:
        return values

    def backward(residuals: Sequence[Any], cotangents: list[Any]) -> tuple[Any, None, Any]:
        # XLA would move computations that do not depend on the cotangent into the forward pass, and
        # keep their results. So the operands are made to depend on the cotangent. For a product in
        # float32, one dependent operand is enough.
        late = _after(_one_of(cotangents[0]), residuals)
        exact, operands = late, late
        if _is_product(eqn):
            first = min(range(len(late)), key=lambda k: residuals[k].size)
            some = [late[k] if k == first else x for k, x in enumerate(residuals)]
            exact, operands = bound(eqn, operands_of(some)), operands_of(late)
        low = _lowered(eqn, operands, exact, dtype)
        given = zip(exact, low, cotangents, (_rounded(c, dtype) for c in cotangents), strict=True)
        each = [_numbers(*arrays) for arrays in given]
        numbers = sum(each[1:], each[0])
        return numbers, None, _after(numbers[0], cotangents)

    tap.defvjp(lambda zeros, residuals, values: (values, residuals), backward)
    return tap


# --- one equation in a 16-bit dtype -------------------------------------------------------------


def _is_float(x: Any) -> bool:
    dtype = getattr(jax.typeof(x), "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _is_product(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in CONTRACTIONS


def _rounded(x: Any, dtype: np.dtype) -> Any:
    """Rounds a float array to a dtype and casts it back; other values are returned as they are."""
    if not _is_float(x):
        return x
    x = jnp.asarray(x)
    return x.astype(dtype).astype(x.dtype)


def _lowered(
    eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any], dtype: np.dtype
) -> list[Any]:
    """Returns the results of an equation in a dtype, given its float32 results.

    The operands of a product are rounded, too, and the product accumulates in float32 as matrix
    units do. The operands of other equations are not rounded here, because this rounding counts as
    an effect of their producers.
    """
    if _is_product(eqn):
        results = bound(eqn, [_rounded(x, dtype) for x in operands])
    return [_rounded(x, dtype) for x in results]


def _one_of(x: Any) -> Any:
    """Returns a number that depends on an array."""
    # On an explicit mesh an element of an array has no sharding of its own, so the number is the
    # maximum of the array.
    is_spread = not getattr(jax.typeof(x).sharding, "mesh", jax.sharding.AbstractMesh((), ())).empty
    return jnp.max(x) if is_spread else x[(0,) * x.ndim]


def _after(number: Any, arrays: Sequence[Any]) -> list[Any]:
    """Returns equal arrays that depend on a number, so that XLA computes them after it.

    An ``optimization_barrier`` would not do: XLA:CPU drops it early. Without this order, the pass
    over a model of 12 layers took 3.9 times the memory of its gradient.
    """
    known = ~jnp.isnan(number)
    return [jnp.where(known, x, jnp.nan) if _is_float(x) else x for x in arrays]


@jax.jit
def _numbers(exact: Any, low: Any, cotangent: Any, low_cotangent: Any) -> Any:
    x, y, c, d = (each.astype(jnp.float32) for each in (exact, low, cotangent, low_cotangent))
    lost = jnp.isfinite(x) & ~jnp.isfinite(y)
    # A change from or to an infinity has no first-order term: `lost` counts overflows instead.
    part = jnp.where(jnp.isfinite(x) & jnp.isfinite(y), (y - x) * c, 0.0)
    known = jnp.isfinite(c)
    off, size = (jnp.where(known, jnp.abs(each), 0.0) for each in (d - c, c))
    each = (part, part * part, lost.astype(jnp.float32), off, size)
    # One reduction of five arrays is one kernel. It sums the last dimension first, because one
    # running sum of all elements would lose digits.
    for axes in (range(x.ndim - 1, x.ndim), range(x.ndim - 1)) if x.ndim else ():
        add = lambda xs, ys: tuple(map(operator.add, xs, ys))  # noqa: E731
        each = lax.reduce(each, (np.float32(0),) * NUMBERS, add, tuple(axes))
    return jnp.stack(each)
