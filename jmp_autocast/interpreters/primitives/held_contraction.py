"""The package's primitives that hold one contraction, in their parameter ``jaxpr``.

The jaxpr declares a 16-bit result. The parameter ``out`` is the dtype that the equation returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...policies import CONTRACTIONS
from ..compat import ClosedJaxpr, JaxprEqn, body_of, with_dtype
from ..compat.registration import saved_as

_HOLDERS: set[str] = set()


def holds_contraction(primitive: Any) -> None:
    """Makes reports and checkpoint policies treat a primitive as its contraction."""
    _HOLDERS.add(primitive.name)
    saved_as(primitive, contraction_in)


def contraction_in(eqn: JaxprEqn) -> Any:
    """Returns the matmul or convolution that an equation of the package's primitives holds.

    Args:
        eqn: The equation.

    Returns:
        The equation of the contraction; None for an equation of another primitive.
    """
    return contraction_of(eqn.params["jaxpr"]) if eqn.primitive.name in _HOLDERS else None


def held_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the jaxpr that holds the contraction of an equation; None for other primitives."""
    return eqn.params["jaxpr"] if eqn.primitive.name in _HOLDERS else None


def contraction_of(jaxpr: ClosedJaxpr) -> Any:
    """Returns the only contraction of a jaxpr."""
    (eqn,) = contractions_of(jaxpr)
    return eqn


def contractions_of(jaxpr: ClosedJaxpr) -> list[Any]:
    """Returns the contractions of a jaxpr."""
    return [e for e in body_of(jaxpr).eqns if e.primitive.name in CONTRACTIONS]


def contraction_aval(*avals: Any, jaxpr: ClosedJaxpr, out: np.dtype, **_: Any) -> Any:
    """Returns the abstract value of the jaxpr's result, in dtype ``out``."""
    return with_dtype(jaxpr.out_avals[0], out)
