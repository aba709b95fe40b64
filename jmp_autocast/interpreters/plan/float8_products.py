"""Which matrix products run in 8 bits, and why the others do not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ...policies import Float8
from ..primitives.dot_dimensions import free
from ..primitives.float8_scale import BLOCK, BLOCK4
from ..primitives.reading import dot_dimensions
from .data import EquationPlan, Multiply8
from .float8_units import refusal
from .reasons import Reason, ReasonCode
from .region import Place

_SCALES = {
    "tensor": "",
    "row": ", scales by row",
    "mx": f", scales of {BLOCK} elements",
    "nv": f", 4 bits, scales of {BLOCK4} elements",
}


def in_8_bits_or_why_not(
    at: Place, plan: EquationPlan, recipe: Float8, of_sources: bool
) -> EquationPlan:
    """Returns the plan of a contraction in 8 bits, or the given one with what is in the way.

    Args:
        at: The equation, which the plan lowers.
        plan: Its plan in the compute dtype.
        recipe: The recipe that is in force where it stands.
        of_sources: Whether the gradient of the weight is the accumulator.
    """
    weights = [i for i in (0, 1) if at.given[i].is_weight]
    cause = _obstacle(at, weights, recipe)
    if cause:
        return dataclasses.replace(plan, reason=Reason(ReasonCode.NOT_FLOAT8, cause))
    (weight,) = weights
    cause = f"operand {weight} is a weight{_SCALES[recipe.scaling]}"
    reason = Reason(ReasonCode.FLOAT8, cause, (weight,))
    return dataclasses.replace(plan, action=Multiply8(recipe, weight, of_sources), reason=reason)


def _obstacle(at: Place, weights: list[int], recipe: Float8) -> str:
    """Returns what keeps a contraction in the compute dtype, "" where nothing does."""
    if not recipe.emulate and (cause := refusal(recipe)):
        return cause
    if at.name != "dot_general":
        return f"no 8-bit product for {at.name}"
    if len(weights) != 1:
        return "both operands are parameters" if weights else "no operand is a parameter"
    other = at.given[1 - weights[0]]
    if other.may_be_rounded or other.integer_bound is not None:
        return f"operand {1 - weights[0]} holds whole numbers, which have no scale"
    if at.given[weights[0]].scales:
        return "the weight is stored with a scale for each layer of a stack, and read as a whole"
    # The spec of an aval names explicit mesh axes only.
    if any(any(v.aval.sharding.spec) for v in at.eqn.invars):
        return "an operand is sharded along explicit mesh axes"
    if at.is_last and "last" in recipe.skip:
        return "no other matrix product follows"
    return _size_in_the_way(at, weights[0], recipe)


def _size_in_the_way(at: Place, weight: int, recipe: Float8) -> str:
    numbers = dot_dimensions(at.eqn)
    shapes = [v.aval.shape for v in at.eqn.invars]
    of_free: list[Any] = [
        math.prod(shapes[i][d] for d in free(numbers, len(shapes[i]), i)) for i in (0, 1)
    ]
    contracted: Any = math.prod(shapes[0][d] for d in numbers[0][0])
    sizes = {"M": of_free[1 - weight], "N": of_free[weight], "K": contracted}
    for name, size in sizes.items():
        if not isinstance(size, int):  # `jax.export` may make it symbolic
            return f"{name} is the symbolic size {size}"
        if size % recipe.multiple:
            return f"{name}={size} is no multiple of {recipe.multiple}"
        # M, the number of tokens, is the batch's: a layer shall not change with it.
        if size < (1 if name == "M" else recipe.minimum):
            return f"{name}={size} is below the minimum, {recipe.minimum}"
    return _block_in_the_way(numbers, shapes, recipe)


def _block_in_the_way(numbers: Any, shapes: Sequence[tuple[int, ...]], recipe: Float8) -> str:
    """Returns which dimension has no whole blocks.

    Each of the three is summed over in one of the three products of a training step, of which the
    first has blocks in NVFP4.
    """
    block = {"mx": BLOCK, "nv": BLOCK4}.get(recipe.scaling, 1)
    summed = [(0, numbers[0][0][-1])]
    if recipe.lowers_gradients:
        summed += [(i, free(numbers, len(shapes[i]), i)[-1]) for i in (0, 1)]
    for i, d in summed:
        if shapes[i][d] % block:
            return f"dimension {d} of operand {i}, {shapes[i][d]}, is no multiple of {block}"
    return ""
