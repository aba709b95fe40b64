"""Chooses the matrix products that run in 8 bits, and gives reasons for those that do not."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..interpreters.compat import AnyJaxpr, aval_of
from ..interpreters.plan.copies import plans_products
from ..interpreters.plan.data import (
    Context,
    Emit,
    EquationPlan,
    Reason,
    ReasonCode,
    Source,
    Stored,
    ValueState,
)
from ..interpreters.plan.structural import INSIDE, Plans, as_made, plans
from ..interpreters.primitives.reading import dot_dimensions
from ..interpreters.regions import PlansProduct
from ..policies import E4M3, FLOAT32, Float8, Policy, as_recipe, may_use_float8
from .dimensions import DimensionNumbers, free
from .dot import Factor, float8_dot
from .last_products import last_products
from .scale import ScaleOf, Values, Weight, factor_keys
from .units import refusal

_SCALES = {"tensor": "", "row": ", scales by row"}


class Products:
    """The planner of 8-bit products for one program.

    Args:
        policy: The policy of the program.
    """

    tag: Weight = Weight()

    def __init__(self, policy: Policy) -> None:
        self._recipe = as_recipe(policy.matmul)
        self._last: frozenset[int] = frozenset()

    def look_at(self, jaxpr: AnyJaxpr) -> None:
        """Finds the products of the program whose results reach no other product."""
        self._last = last_products(jaxpr)

    def in_scope(self, name: str) -> PlansProduct | None:
        """Returns the function that plans products in a scope; None if they stay in 16 bits."""
        if not name:
            return self._recipe and functools.partial(self._planned, self._recipe)
        # A scope with a "float8" rule skips no product: a product whose result reaches no other
        # product (`look_at`) runs in 8 bits there, too.
        recipe = dataclasses.replace(self._recipe or Float8(), skip=())
        return functools.partial(self._planned, recipe)

    def _planned(
        self, recipe: Float8, ctx: Context, plan: EquationPlan, of_sources: bool
    ) -> EquationPlan:
        """Returns the 8-bit plan of a contraction, or the given plan with the reason for 16 bits.

        Args:
            recipe: The recipe in the equation's scope.
            ctx: The equation.
            plan: The equation's plan in the compute dtype.
            of_sources: Whether the weight enters the product in float32, so that its gradient is
                the float32 accumulator.
        """
        weights = [i for i in (0, 1) if isinstance(ctx.given[i].tag, Weight)]
        cause = _obstacle(ctx, weights, recipe, id(ctx.eqn) in self._last)
        if cause:
            return dataclasses.replace(plan, reason=Reason(ReasonCode.NOT_FLOAT8, cause))
        (weight,), numbers = weights, dot_dimensions(ctx.eqn)
        cause = f"operand {weight} is a weight{_SCALES[recipe.scaling]}"
        out = plan.results[0].dtype
        assert out is not None
        ranks = [aval_of(v).ndim for v in ctx.eqn.invars]
        action = Emit(
            Multiply(recipe, numbers, weight, out),
            "float8_dot",
            tuple((i, k) for i in (0, 1) for k in factor_keys(recipe, numbers, ranks[i], i)),
            # The weight enters in float32, so that its gradient is float32. The activation enters
            # in the compute dtype.
            as_they_are=(weight,) if of_sources else (),
            reads=(E4M3, E4M3),
        )
        reason = Reason(ReasonCode.FLOAT8, cause, (weight,))
        return dataclasses.replace(plan, action=action, reason=reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Multiply:
    """A function that multiplies two operands in 8 bits by `float8_dot`.

    The operands are quantized in their computed dtypes: a float32 activation is not cast to 16 bits
    first, which would round it twice.

    Args:
        recipe: How the operands and derivatives are quantized.
        numbers: The dimension numbers of the product.
        weight: The position of the weight.
        out: The dtype of the result.
    """

    recipe: Float8
    numbers: DimensionNumbers
    weight: int
    out: np.dtype

    def __call__(self, lhs: Any, rhs: Any, *copies: Any) -> Any:
        """Returns the product; ``copies`` are the values and the scale of each factor."""
        return float8_dot(
            Factor(lhs, *copies[:2]),
            Factor(rhs, *copies[2:]),
            self.numbers,
            recipe=self.recipe,
            weight=self.weight,
            out=self.out,
        )


@plans_products
def _products(policy: Policy) -> Products | None:
    return Products(policy) if may_use_float8(policy) else None


plans("float8_dot", "tangent_carrier", "row_major")(as_made)


@plans("dequantize")
def _stored(planner: Plans, ctx: Context) -> EquationPlan:
    """Plans the float32 value of a `QuantizedArray` as a parameter, whichever argument holds it."""
    values, scale = map(aval_of, ctx.eqn.invars)
    tag = Weight(scale.ndim, trained=False) if may_use_float8(ctx.policy) else None
    state, key = ValueState(FLOAT32, Source.PARAM, tag=tag), Values(np.dtype(values.dtype))
    action = Stored((key, ScaleOf(key)))
    return EquationPlan(action, ctx.given, (None, None), (state,), INSIDE)


def _obstacle(ctx: Context, weights: list[int], recipe: Float8, is_last: bool) -> str:
    """Returns the reason why a contraction stays in the compute dtype; "" if it runs in 8 bits."""
    if not recipe.emulate and (cause := refusal()):
        return cause
    if ctx.name != "dot_general":
        return f"no 8-bit product for {ctx.name}"
    if len(weights) != 1:
        return "both operands are parameters" if weights else "no operand is a parameter"
    other = ctx.given[1 - weights[0]]
    if other.may_be_rounded or ctx.marks[1 - weights[0]].whole:
        return f"operand {1 - weights[0]} holds whole numbers, which have no scale"
    tag = ctx.given[weights[0]].tag
    if tag is not None and tag.in_slices:
        return "the weight is stored with a scale for each layer of a stack, and read as a whole"
    # The sharding of an aval names only explicit mesh axes.
    if any(any(aval_of(v).sharding.spec) for v in ctx.eqn.invars):
        return "an operand is sharded along explicit mesh axes"
    if is_last and "last" in recipe.skip:
        return "no other matrix product follows"
    return _size_in_the_way(ctx, weights[0], recipe)


def untrained(states: Sequence[ValueState]) -> list[ValueState]:
    """Returns the input states with all parameters marked as untrained, as for inference."""
    return [
        dataclasses.replace(s, tag=dataclasses.replace(s.tag, trained=False))
        if isinstance(s.tag, Weight)
        else s
        for s in states
    ]


def _size_in_the_way(ctx: Context, weight: int, recipe: Float8) -> str:
    numbers = dot_dimensions(ctx.eqn)
    shapes = [aval_of(v).shape for v in ctx.eqn.invars]
    of_free: list[Any] = [
        math.prod(shapes[i][d] for d in free(numbers, len(shapes[i]), i)) for i in (0, 1)
    ]
    contracted: Any = math.prod(shapes[0][d] for d in numbers[0][0])
    sizes = {"M": of_free[1 - weight], "N": of_free[weight], "K": contracted}
    tag = ctx.given[weight].tag
    # M, the number of tokens, matters only for the gradient of the weight, which sums over tokens.
    # So for an untrained weight any M runs in 8 bits. With a batch of 1, a program with 14 MB of
    # weights took 57 MB of temporaries on a CPU in 16 bits, because each weight was copied and a
    # stack of weights was copied in float32. It takes 39 MB in 8 bits.
    if isinstance(tag, Weight) and not tag.trained and recipe.scaling == "tensor":
        del sizes["M"]
    for name, size in sizes.items():
        if not isinstance(size, int):  # symbolic in `jax.export`
            return f"{name} is the symbolic size {size}"
        if size % recipe.multiple:
            return f"{name}={size} is no multiple of {recipe.multiple}"
        # `multiple` applies to M, but `minimum` does not: small and large batches that are
        # multiples run in the same dtypes.
        if size < (1 if name == "M" else recipe.minimum):
            return f"{name}={size} is below the minimum, {recipe.minimum}"
    return ""
