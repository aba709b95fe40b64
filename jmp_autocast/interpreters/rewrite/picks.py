"""Elements that are picked of a float32 value: picked first, and computed then."""

from __future__ import annotations

from typing import Any, Protocol

from ..compat import mark_frames
from ..plan.data import EquationPlan
from ..primitives.picking import picked_by_rows, picked_elements, with_all_dimensions
from ..primitives.source_view import detached, source_view
from .values import Maker, Scalar, Value, read

mark_frames(__file__)


class EmitsEquations(Protocol):
    """What emits an equation: the rewriter."""

    def emit_equation(self, eqn: Any, plan: EquationPlan, operands: list[Any]) -> list[Value]:
        """Emits an equation; see `Rewriter.emit_equation`."""
        ...


def picked(emits: EmitsEquations, eqn: Any, plan: EquationPlan, operands: list[Any]) -> Any:
    """Picks elements of a float32 value from the 16-bit value that it is computed from.

    The result has the value of that, and the derivative of picking from the float32 value. So the
    cotangent meets in float32 those of the other readers: in a softmax the label's logit has the
    gradient ``p - 1``, which two 16-bit terms do not give: at p = 0.999 bfloat16 makes it 0.

    Args:
        emits: The rewriter.
        eqn: The gather.
        plan: Its plan, whose action is `Pick`.
        operands: Its operands, as `Value`.

    Returns:
        The result, as an array.
    """
    arrays = read(plan, operands)
    # Who names explicit mesh axes says where each result lies; XLA divides all others itself.
    if any(any(v.aval.sharding.spec) for v in (eqn.invars[0], eqn.outvars[0])):
        return picked_elements(eqn, *arrays)
    found = _Picking(emits, eqn, arrays[1]).of(operands[0])
    return source_view(picked_by_rows(eqn, *arrays), found.read(arrays[0].dtype))


class _Picking:
    """The elements that a gather picks, of each value that its operand is computed from.

    Args:
        emits: The rewriter.
        eqn: The gather.
        indices: Its indices.
    """

    def __init__(self, emits: EmitsEquations, eqn: Any, indices: Any) -> None:
        self._emits = emits
        self._eqn = eqn
        self._indices = indices
        self._found: dict[int, Value | Scalar | None] = {}

    def of(self, value: Any) -> Any:
        """Returns the picked elements of a value, None where it has another shape."""
        if isinstance(value, Scalar):
            return value
        if id(value) not in self._found:
            self._found[id(value)] = self._computed(value.made_by) or self._gathered(value.array)
        return self._found[id(value)]

    def _computed(self, maker: Maker | None) -> Value | None:
        """Returns the elements computed from those of the operands, None where that cannot be."""
        if maker is None:
            return None
        eqn, plan, operands = maker
        if eqn.primitive.name == "broadcast_in_dim":
            return self._gathered(with_all_dimensions(eqn, operands[0].read(plan.operands[0])))
        picked = [self.of(operand) for operand in operands]
        if any(operand is None for operand in picked):
            return None
        return self._emits.emit_equation(eqn, plan, picked)[0]

    def _gathered(self, array: Any) -> Value | None:
        if array.ndim == 0:
            return Value(array)
        is_whole = array.shape == self._eqn.invars[0].aval.shape
        pick = picked_by_rows if is_whole else picked_elements
        found = pick(self._eqn, detached(array), self._indices)
        return None if found is None else Value(found)
