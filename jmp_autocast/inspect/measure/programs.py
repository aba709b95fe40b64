"""Programs that run side by side: a lane is one of them, as a way to run each equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ...interpreters import Plan, Rewriter
from ...interpreters.compat import bind
from ...interpreters.rewrite.values import Scalar, Value
from .measured import bodies_of


class Lane(Protocol):
    """One program over a jaxpr. All lanes of a run have the same equations."""

    def emit(self, i: int, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Runs equation ``i`` on operands of this lane."""
        ...

    def enter(self, i: int, operands: Sequence[Any]) -> list[Any]:
        """Returns the operands of equation ``i`` as what is inside it reads them."""
        ...

    def leave(self, i: int, results: Sequence[Any]) -> list[Any]:
        """Returns the results of equation ``i`` as its readers get them."""
        ...

    def inner(self, i: int, eqn: Any) -> list[Lane]:
        """Returns the lanes of the jaxprs inside equation ``i``."""
        ...

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """Returns the outputs in the dtypes that the caller gets."""
        ...


class Declared:
    """The program as it was traced."""

    def emit(self, i: int, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Runs equation ``i`` on operands of this lane."""
        out = bind(eqn.primitive, operands, eqn.params)
        return list(out) if eqn.primitive.multiple_results else [out]

    def enter(self, i: int, operands: Sequence[Any]) -> list[Any]:
        """Returns the operands as they are."""
        return list(operands)

    def leave(self, i: int, results: Sequence[Any]) -> list[Any]:
        """Returns the results as they are."""
        return list(results)

    def inner(self, i: int, eqn: Any) -> list[Lane]:
        """Returns the lanes of the jaxprs inside equation ``i``."""
        return [self for _ in bodies_of(eqn)]

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """Returns the outputs as they are."""
        return list(values)


class Planned:
    """The program as `autocast` rewrites it, without what matters to derivatives alone.

    Args:
        plan: The plan of the jaxpr.
        rewriter: Emits its equations.
    """

    def __init__(self, plan: Plan, rewriter: Rewriter) -> None:
        self._plan = plan
        self._rewriter = rewriter

    def emit(self, i: int, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Runs equation ``i`` on operands of this lane."""
        values = [_as_value(x) for x in operands]
        results = self._rewriter.emit_equation(eqn, self._plan.equations[i], values)
        return [value.array for value in results]

    def enter(self, i: int, operands: Sequence[Any]) -> list[Any]:
        """Returns the operands of equation ``i`` in the dtypes that its inside reads."""
        dtypes = self._plan.equations[i].operands
        return [_as_value(x).read(d) for x, d in zip(operands, dtypes, strict=True)]

    def leave(self, i: int, results: Sequence[Any]) -> list[Any]:
        """Returns the results of equation ``i`` in the dtypes that its plan says."""
        casts = self._plan.equations[i].casts or (None,) * len(results)
        return [_as_value(x).read(d) for x, d in zip(results, casts, strict=True)]

    def inner(self, i: int, eqn: Any) -> list[Lane]:
        """Returns the lanes inside equation ``i``; one that is kept runs as it was declared."""
        inner = self._plan.equations[i].inner
        if not inner:
            return [Declared() for _ in bodies_of(eqn)]
        return [Planned(plan, self._rewriter) for plan in inner]

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """Returns the outputs in the dtypes that the plan says."""
        dtypes = self._plan.output_dtypes
        return [_as_value(x).read(d) for x, d in zip(values, dtypes, strict=True)]


def _as_value(x: Any) -> Value | Scalar:
    is_literal = isinstance(x, bool | int | float | complex | np.generic)
    return Scalar(x) if is_literal else Value(x)
