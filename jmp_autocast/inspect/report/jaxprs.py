"""Bytes, floating point operations and casts of jaxprs.

A symbolic length of `jax.export` counts as 128, so that a report has numbers to sum and to sort.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax.numpy as jnp

from ...interpreters.compat import AnyJaxpr, Atom, JaxprEqn, assumed_size
from ...interpreters.plan.avals import element_count
from ...interpreters.primitives.flops import flops
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.structure import bodies, equations_in
from ...policies import COMPUTE_DTYPES, DATA_MOVEMENT, FLOAT32, STRUCTURAL


def flops_of(eqn: JaxprEqn) -> int:
    """Returns the estimated floating point operations of one run of an equation.

    Data movement and casts have none. Equations with bodies have none either, because the equations
    in the bodies count.
    """
    name = (contraction_in(eqn) or eqn).primitive.name
    has_none = name in DATA_MOVEMENT or name in STRUCTURAL or bodies(eqn)
    return 0 if has_none else assumed_size(flops(eqn))


def nbytes_of(atom: Atom, dtype: str | None = None) -> int:
    """Returns the bytes of a variable or literal in a dtype, by default its own; 0 for a token."""
    declared = getattr(atom.aval, "dtype", None)
    if declared is None:
        return 0
    # A random key is never cast. Its dtype is not looked up by name: NumPy does not know the name.
    item = declared if dtype in (None, str(declared)) else jnp.dtype(dtype)
    # Some dtypes of JAX, such as the pair of an int8 and its tangent, have no item size: their
    # arrays count as 0 bytes.
    return assumed_size(element_count(atom)) * getattr(item, "itemsize", 0)


@dataclasses.dataclass(frozen=True)
class Casts:
    """Casts between float32 and the 16-bit dtypes; a cast in a loop counts in each iteration.

    Args:
        down: The number of casts to 16 bits.
        down_nbytes: The bytes that the casts to 16 bits load and store.
        up: The number of casts to float32.
        up_nbytes: The bytes that the casts to float32 load and store.
    """

    down: int = 0
    down_nbytes: int = 0
    up: int = 0
    up_nbytes: int = 0


def count_casts(jaxpr: AnyJaxpr) -> Casts:
    """Counts the casts of a jaxpr, open or closed, and of its bodies.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> count_casts(jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16))(jnp.ones(3)))
        Casts(down=1, down_nbytes=18, up=0, up_nbytes=0)
    """
    found: Counter[str] = Counter()
    for eqn, times in equations_in(jaxpr):
        if eqn.primitive.name != "convert_element_type":
            continue
        (operand,), (result,) = eqn.invars, eqn.outvars
        for way, full, low in (("down", operand, result), ("up", result, operand)):
            if full.aval.dtype == FLOAT32 and low.aval.dtype in COMPUTE_DTYPES:
                found[way] += times
                found[f"{way}_nbytes"] += times * (nbytes_of(full) + nbytes_of(low))
    return Casts(**found)
