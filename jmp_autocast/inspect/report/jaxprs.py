"""What jaxprs hold in numbers: bytes, floating point operations, casts.

`jax.export` may make a length symbolic. It counts as 128 then, so that a report has numbers to add
up and to sort by, and says so.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax.numpy as jnp

from ...interpreters.compat import AnyJaxpr, Atom, JaxprEqn, assumed_size
from ...interpreters.plan.symbolic_sizes import element_count
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.reading import flops
from ...interpreters.primitives.structure import bodies, equations_in
from ...policies import COMPUTE_DTYPES, DATA_MOVEMENT, FLOAT32, STRUCTURAL


def is_arithmetic(eqn: JaxprEqn) -> bool:
    """False for data movement, casts, and what has a jaxpr inside, whose own equations count."""
    name = (contraction_in(eqn) or eqn).primitive.name
    return name not in DATA_MOVEMENT and name not in STRUCTURAL and not bodies(eqn)


def flops_of(eqn: JaxprEqn) -> int:
    """Returns the estimated floating point operations of one run of an equation."""
    return assumed_size(flops(eqn)) if is_arithmetic(eqn) else 0


def nbytes_of(atom: Atom, dtype: str | None = None) -> int:
    """Returns the bytes of a variable or literal, 0 for what is no array.

    Args:
        atom: The variable or literal.
        dtype: The name of the dtype that it has, None for the one it declares.
    """
    declared = getattr(atom.aval, "dtype", None)
    if declared is None:
        return 0
    # A random key has a dtype that NumPy does not know. It is never cast.
    item = declared if dtype in (None, str(declared)) else jnp.dtype(dtype)
    # Other dtypes of JAX, such as the pair of an int8 and its tangent, say nothing of their bytes.
    return assumed_size(element_count(atom)) * getattr(item, "itemsize", 0)


@dataclasses.dataclass(frozen=True)
class Casts:
    """Casts between float32 and the 16-bit dtypes, with loops multiplied by their length.

    Args:
        down: The number of casts to 16 bits.
        down_nbytes: The bytes that they read and write.
        up: The number of casts to float32.
        up_nbytes: The bytes that they read and write.
    """

    down: int = 0
    down_nbytes: int = 0
    up: int = 0
    up_nbytes: int = 0


def count_casts(jaxpr: AnyJaxpr) -> Casts:
    """Counts the casts of a jaxpr and of those inside it.

    Args:
        jaxpr: An open or closed jaxpr.

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
        # Casts of other dtypes are the program's own: `autocast` makes none of them.
        for way, full, low in (("down", operand, result), ("up", result, operand)):
            if full.aval.dtype == FLOAT32 and low.aval.dtype in COMPUTE_DTYPES:
                found[way] += times
                found[f"{way}_nbytes"] += times * (nbytes_of(full) + nbytes_of(low))
    return Casts(**found)
