"""Products of floats and of numbers that are none: masks, one-hot rows, counts.

``jnp.matmul`` traces a product of int8 and float32 as one equation, without a cast. JAX computes it
in float32, where matrix units multiply 16 bits. It is planned as if the numbers were cast first, as
``one_hot(ids, n, dtype=jnp.int8).astype(jnp.float32) @ w`` casts them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..primitives.traits import having
from .data import EquationPlan
from .float_dtypes import is_narrower
from .region import Place
from .value_facts import number_state

_CONTRACTS = having("contracts")


def with_numbers_cast(at: Place) -> Place:
    """Returns a product where it stands, with operands that are numbers as their casts to floats.

    Args:
        at: Any equation; returned as it is where it is no product of a float and a number.
    """
    if at.name not in _CONTRACTS or at.region.compute_dtype is None:
        return at
    factors = list(zip(at.eqn.invars[:2], at.given[:2], strict=True))
    is_number = [s.dtype is None and _is_number(v.aval.dtype) for v, s in factors]
    if sum(is_number) != 1 or not any(s.dtype for _, s in factors):
        return at
    given = [
        number_state(v.aval.dtype, at.wide, s, at.wide) if is_one else s
        for (v, s), is_one in zip(factors, is_number, strict=True)
    ]
    # Numbers have no scale: their products are not in 8 bits.
    region = dataclasses.replace(at.region, float8=None)
    return at._replace(given=(*given, *at.given[2:]), region=region)


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "biu"


def as_numbers(at: Place, cast: EquationPlan, kept: EquationPlan) -> EquationPlan:
    """Returns the plan of a product of a float and a number.

    Args:
        at: The product where it stands.
        cast: Its plan with the number cast to a float.
        kept: Its plan as the program has it.
    """
    if any(is_narrower(dtype, at.wide) for dtype in cast.operands):
        return dataclasses.replace(cast, given=at.given)
    return dataclasses.replace(kept, reason=cast.reason)
