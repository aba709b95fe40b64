"""Where an equation stands: what is known and asked there, and which precision is in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..regions import Region
from .data import ValueState, Want
from .float_dtypes import float_dtype
from .marks import Marks
from .needs import NOTHING, Need


class Place(NamedTuple):
    """An equation where it stands: made anew for each, in a third of a dataclass's time.

    Args:
        eqn: The equation.
        given: What is known of each operand.
        region: The precision of the scope that the equation is in.
        wants: What the readers of each result ask for; empty if no sweep said.
        made: The marks of its operands.
        need: What its first result is needed for.
        accumulates: It computes an accumulator: `marks`.
    """

    eqn: Any
    given: tuple[ValueState, ...]
    region: Region
    wants: tuple[Want, ...] = ()
    made: Sequence[Marks] = ()
    need: Need = NOTHING
    accumulates: bool = False

    @property
    def name(self) -> str:
        """The name of the equation's primitive."""
        return self.eqn.primitive.name

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype of matmuls here, where anything is lowered."""
        assert self.region.compute_dtype is not None
        return self.region.compute_dtype

    @property
    def wide(self) -> np.dtype:
        """The wide dtype of the policy."""
        return self.region.wide

    def kept(self, variable: Any) -> np.dtype | None:
        """Returns the dtype of a value that is not lowered, None for what is no float."""
        declared = self.declared(variable)
        return declared and (self.region.island or declared)

    @property
    def full(self) -> np.dtype:
        """The dtype here of what is not lowered: the wide one, or that of the island."""
        return self.region.island or self.region.wide

    def declared(self, variable: Any) -> np.dtype | None:
        """Returns the dtype that the program declares for a value, None for what is no float."""
        return float_dtype(variable.aval, self.region.wide)

    @property
    def floats(self) -> list[int]:
        """The positions of the float operands."""
        return [i for i, state in enumerate(self.given) if state.dtype is not None]
