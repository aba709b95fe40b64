"""Products in 8 bits, of values and their copies."""

from __future__ import annotations

from typing import Any

from ..compat import bind
from ..plan.data import EquationPlan, Multiply8
from ..primitives.float8_dot import Factor, float8_dot
from ..primitives.float8_scale import ScaleOf, factor_keys
from ..primitives.reading import dot_dimensions
from .values import Value


def stored(eqn: Any, plan: EquationPlan, operands: list[Any]) -> Value:
    """Returns the float32 array that is stored in 8 bits, with the stored one as its copy.

    Args:
        eqn: The equation.
        plan: Its plan, whose action is `Stored`.
        operands: The values and their scale, or scales, as `Value`.
    """
    values, scale = (value.array for value in operands)
    made = Value.of(bind(eqn.primitive, (values, scale), eqn.params), plan.results[0])
    made.copies |= {values.dtype: values, ScaleOf(values.dtype): scale}
    return made


def multiplied_in_8_bits(eqn: Any, plan: EquationPlan, operands: list[Any]) -> Any:
    """Returns the product of two operands in 8 bits.

    Args:
        eqn: The equation of the product.
        plan: Its plan, whose action is `Multiply8`.
        operands: Its operands, as `Value`.
    """
    action = plan.action
    assert isinstance(action, Multiply8)
    # The copies are of the values as they were computed: rounding a float32 activation to 16 bits
    # first would round it twice. Derivatives are with respect to the weight in float32, and to the
    # activation in the compute dtype.
    sources = [
        value.array if i == action.weight and action.of_sources else value.read(dtype)
        for i, (value, dtype) in enumerate(zip(operands, plan.operands, strict=True))
    ]
    numbers = dot_dimensions(eqn)
    keys = [factor_keys(action.recipe, numbers, v.array.ndim, i) for i, v in enumerate(operands)]
    lhs, rhs = (
        Factor(source, *map(value.copy, pair))
        for source, value, pair in zip(sources, operands, keys, strict=True)
    )
    out = plan.results[0].dtype
    assert out is not None
    return float8_dot(
        lhs,
        rhs,
        numbers,
        recipe=action.recipe,
        weight=action.weight,
        out=out,
    )
