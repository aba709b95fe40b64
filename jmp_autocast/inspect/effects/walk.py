"""Runs a program, and measures in its backward pass what rounding each site does to a scalar.

The results of a site pass through an identity whose derivative rule sees their cotangents. The rule
returns the numbers of the site as the gradient of an array of zeros, which the identity takes as
well. So only a few numbers of each site outlive its backward pass, and a loop returns them by
iteration. The rounding errors are computed in the backward pass, and never stored for it.
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

from ...interpreters.compat import (
    AnyJaxpr,
    JaxprEqn,
    Literal,
    bound,
    consts_of,
    device_varying,
    fresh_make_jaxpr,
    literal_value,
    varying_axes,
)
from ...interpreters.primitives.evaluate import evaluate
from ...interpreters.primitives.structure import (
    Copy,
    bodies,
    rebound,
    runs_again,
    scan_direction,
    shard_map_options,
)
from .rounding import is_float, is_product, lowered, rounded
from .sites import Tree

NUMBERS = 5
"""How many numbers of a site are measured: the change of the scalar to first order; the sum of the
squares of its parts; how many elements are finite in float32 alone; the sum of the magnitudes of
the cotangents' own rounding errors; and that of the cotangents."""


class Tapped:
    """A run of a program that measures its sites.

    Args:
        dtype: The dtype that sites are rounded to.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype

    def run(self, jaxpr: AnyJaxpr, arrays: Sequence[Any], zeros: Tree) -> list[Any]:
        """Returns the outputs of a jaxpr.

        Args:
            jaxpr: The jaxpr.
            arrays: Its inputs.
            zeros: For each site an array of ``(*loops, NUMBERS)``, whose gradient are its numbers.
        """

        def step(i: int, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            found = zeros.get(i)
            if isinstance(found, list):
                return self._inside(eqn, operands, found)
            if found is not None:
                return self._site(eqn, operands, found)
            if eqn.primitive.name == "while":  # it has no backward pass
                operands = [lax.stop_gradient(x) if is_float(x) else x for x in operands]
            return bound(eqn, operands)

        return evaluate(jaxpr, consts_of(jaxpr), arrays, literal_value, step)

    def _site(self, eqn: JaxprEqn, operands: Sequence[Any], zeros: Any) -> list[Any]:
        results = bound(eqn, operands)
        floats = [k for k, x in enumerate(results) if is_float(x)]
        values = [results[k] for k in floats]
        kept: list[Any] = values
        if is_product(eqn):  # as for the derivative of a product
            pairs = zip(eqn.invars, operands, strict=True)
            kept = [x for v, x in pairs if not isinstance(v, Literal)]
        # In a device map each device has its own part of the numbers.
        zeros = device_varying(zeros, frozenset().union(*map(varying_axes, values)))
        for k, x in zip(floats, _tap(eqn, self._dtype)(zeros, kept, values), strict=True):
            results[k] = x
        return results

    def _inside(self, eqn: JaxprEqn, operands: list[Any], zeros: list[Tree]) -> Sequence[Any]:
        found = bodies(eqn)
        if eqn.primitive.name == "cond":
            branches = [
                lambda zeros, args, k=k: self.run(found[k].jaxpr, args, zeros[k])
                for k in range(len(found))
            ]
            return lax.switch(operands[0], branches, zeros, operands[1:])
        (body,), (tree,) = found, zeros
        if eqn.primitive.name == "scan":
            fixed, carries = operands[: body.fixed], len(body.carries)
            start, scanned = (operands[body.fixed :][:carries], operands[body.fixed :][carries:])

            def step(carry: list[Any], slices: Any) -> tuple[list[Any], list[Any]]:
                xs, of_iteration = slices
                made = self.run(body.jaxpr, [*fixed, *carry, *xs], of_iteration)
                return made[:carries], made[carries:]

            last, stacked = lax.scan(step, start, (scanned, tree), **scan_direction(eqn))
            return [*last, *stacked]
        if eqn.primitive.name == "shard_map":
            options = shard_map_options(eqn)
            # The zeros are the same on all devices: their gradient is the sum over them.
            options["in_specs"] = options["in_specs"], PartitionSpec()
            inside = lambda args, zeros: tuple(self.run(body.jaxpr, args, zeros))  # noqa: E731
            return list(jax.shard_map(inside, **options)(tuple(operands), tree))
        if runs_again(eqn) and eqn.primitive.name != "remat_opt":
            return self._checkpoint(eqn, body.jaxpr, operands, tree)
        return self.run(body.jaxpr, operands, tree)

    def _checkpoint(
        self, eqn: JaxprEqn, jaxpr: AnyJaxpr, operands: list[Any], zeros: Tree
    ) -> Sequence[Any]:
        """Binds a checkpoint: its backward pass computes again what the user's would."""
        leaves, tree = jax.tree.flatten(zeros)
        count = len(operands)

        def run(*arrays: Any) -> list[Any]:
            return self.run(jaxpr, arrays[:count], jax.tree.unflatten(tree, arrays[count:]))

        closed = fresh_make_jaxpr(run, *map(jax.typeof, (*operands, *leaves)))
        args, params = rebound(eqn, operands, [closed], [[Copy(0, leaf) for leaf in leaves]])
        return eqn.primitive.bind(*args, **params)


def _tap(eqn: JaxprEqn, dtype: np.dtype) -> Any:
    """Returns the identity for a site's results, which measures the site.

    It takes the zeros, what is stored for the backward pass, and the float results. It closes over
    no array: a checkpoint could not compute that again.
    """

    def operands_of(kept: Sequence[Any]) -> list[Any]:
        given = iter(kept)
        return [literal_value(v) if isinstance(v, Literal) else next(given) for v in eqn.invars]

    @jax.custom_vjp
    def tap(zeros: Any, kept: Sequence[Any], values: list[Any]) -> list[Any]:
        return values

    def backward(kept: Sequence[Any], cotangents: list[Any]) -> tuple[Any, None, Any]:
        # XLA would compute what does not depend on the cotangent in the forward pass, and keep it.
        # For a product in float32 one late operand is enough.
        late = _after(_one_of(cotangents[0]), kept)
        exact, operands = late, late
        if is_product(eqn):
            first = min(range(len(kept)), key=lambda k: kept[k].size)
            some = [late[k] if k == first else x for k, x in enumerate(kept)]
            exact, operands = bound(eqn, operands_of(some)), operands_of(late)
        low = lowered(eqn, operands, exact, dtype)
        given = zip(exact, low, cotangents, (rounded(c, dtype) for c in cotangents), strict=True)
        each = [_numbers(*arrays) for arrays in given]
        numbers = sum(each[1:], each[0])
        return numbers, None, _after(numbers[0], cotangents)

    tap.defvjp(lambda zeros, kept, values: (values, kept), backward)
    return tap


def _one_of(x: Any) -> Any:
    """Returns a number that is there only when an array is."""
    # On an explicit mesh an element has no device of its own.
    is_spread = not getattr(jax.typeof(x).sharding, "mesh", jax.sharding.AbstractMesh((), ())).empty
    return jnp.max(x) if is_spread else x[(0,) * x.ndim]


def _after(number: Any, arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays that are there only when a number is.

    It has to be a use of the number: XLA:CPU drops an ``optimization_barrier`` early. Without it
    the pass of 12 layers took 3.9 times the memory of a gradient.
    """
    known = ~jnp.isnan(number)
    return [jnp.where(known, x, jnp.nan) if is_float(x) else x for x in arrays]


@jax.jit
def _numbers(exact: Any, low: Any, cotangent: Any, low_cotangent: Any) -> Any:
    x, y, c, d = (each.astype(jnp.float32) for each in (exact, low, cotangent, low_cotangent))
    lost = jnp.isfinite(x) & ~jnp.isfinite(y)
    # First order says nothing of an infinity: it is counted instead.
    part = jnp.where(jnp.isfinite(x) & jnp.isfinite(y), (y - x) * c, 0.0)
    known = jnp.isfinite(c)
    off, size = (jnp.where(known, jnp.abs(each), 0.0) for each in (d - c, c))
    each = (part, part * part, lost.astype(jnp.float32), off, size)
    # One reduction of five arrays is one kernel. Along the last dimension first: a sum of all
    # elements, one after the other, would lose digits.
    for axes in (range(x.ndim - 1, x.ndim), range(x.ndim - 1)) if x.ndim else ():
        each = lax.reduce(each, (np.float32(0),) * NUMBERS, _added, tuple(axes))
    return jnp.stack(each)


def _added(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(operator.add, x, y))
