"""Functions whose difference from 1 is a function of its own, with digits where the first has none.

In bfloat16 a sigmoid of 7 is 1, and ``1 - sigmoid(7)`` is 0 instead of 0.0009: a gate that never
opens. ``sigmoid(-7)`` is 0.0009 in 16 bits as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax import lax

from ..compat import Literal

COMPLEMENTS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "logistic": lambda x: lax.logistic(lax.neg(x)),
        "erf": lax.erfc,
        "erfc": lax.erf,
    }
)
"""From a primitive to the function that is 1 less its result, of the same operand."""


def subtracted_from_one(eqn: Any) -> Any:
    """Returns the variable ``x`` of an equation ``1 - x``, None for any other equation.

    Example:
        >>> import jax
        >>> (eqn,) = jax.make_jaxpr(lambda x: 1 - x)(0.5).jaxpr.eqns
        >>> subtracted_from_one(eqn) is eqn.invars[1]
        True
    """
    if eqn.primitive.name != "sub":
        return None
    first, second = eqn.invars
    is_complement = isinstance(first, Literal) and first.val == 1
    return second if is_complement and not isinstance(second, Literal) else None
