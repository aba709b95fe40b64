"""Casts the integers and bools that a product multiplies by floats: masks, one-hot rows, counts.

``jnp.matmul`` traces a product of int8 and float32 as one equation, without a cast. JAX computes it
in float32, where matrix units multiply 16 bits. With the cast it is a product like any other, as
``one_hot(ids, n, dtype=jnp.int8).astype(jnp.float32) @ w`` writes it, of the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from ...policies import FLOAT_DTYPES
from ..compat import AnyJaxpr, JaxprEqn, aval_of, body_of, with_dtype
from ..compat.rebuilding import equation_like, variable, with_equations
from ..primitives.traits import having
from ..regions import RegionOf

_CONTRACTS = having("contracts")


def numbers_cast(jaxpr: AnyJaxpr, region_of: RegionOf) -> Any:
    """Returns a jaxpr in which a product of a float and an integer has two float operands.

    Args:
        jaxpr: An open or closed jaxpr.
        region_of: Returns the region of an equation.
    """
    casts: dict[Any, Any] = {}
    eqns: list[Any] = []
    for eqn in body_of(jaxpr).eqns:
        i = _number(eqn) if eqn.primitive.name in _CONTRACTS else None
        if i is not None and region_of(eqn).may_change(eqn.primitive.name):
            number, dtype = eqn.invars[i], aval_of(eqn.outvars[0]).dtype
            if (number, dtype) not in casts:
                made = casts[number, dtype] = variable(with_dtype(number.aval, dtype))
                params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
                primitive = lax.convert_element_type_p
                eqns.append(equation_like(eqn, primitive, [number], made, params))
            operands = list(eqn.invars)
            operands[i] = casts[number, dtype]
            eqn = eqn.replace(invars=operands)
        eqns.append(eqn)
    return with_equations(jaxpr, eqns)


def _number(eqn: JaxprEqn) -> int | None:
    """Returns the factor that is a cast integer if the other is a float with the result's type."""
    dtypes = [aval_of(v).dtype for v in (*eqn.invars[:2], eqn.outvars[0])]
    for i in (0, 1):
        of_number, of_float, result = dtypes[i], dtypes[1 - i], dtypes[2]
        is_number = isinstance(of_number, np.dtype) and of_number.kind in "biu"
        if is_number and of_float == result and result in FLOAT_DTYPES:
            return i
    return None
