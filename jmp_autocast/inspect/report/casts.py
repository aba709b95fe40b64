"""The casts of a program, read from its jaxpr."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...policies import COMPUTE_DTYPES, FLOAT32
from .jaxprs import bytes_of, equations_in


@dataclasses.dataclass(frozen=True)
class Casts:
    """Casts between float32 and the 16-bit dtypes, with loops multiplied by their length.

    Args:
        down: The number of casts to 16 bits.
        down_size: The bytes that they read and write.
        up: The number of casts to float32.
        up_size: The bytes that they read and write.
    """

    down: int = 0
    down_size: int = 0
    up: int = 0
    up_size: int = 0


def casts_in(jaxpr: Any) -> Casts:
    """Counts the casts of a jaxpr and of those inside it.

    Args:
        jaxpr: An open or closed jaxpr.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> casts_in(jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16))(jnp.ones(3)))
        Casts(down=1, down_size=18, up=0, up_size=0)
    """
    down = down_size = up = up_size = 0
    for eqn, times in equations_in(jaxpr):
        if eqn.primitive.name != "convert_element_type":
            continue
        (operand,), (result,) = eqn.invars, eqn.outvars
        ends = (operand.aval.dtype, result.aval.dtype)
        size = times * (bytes_of(operand) + bytes_of(result))
        if ends[0] == FLOAT32 and ends[1] in COMPUTE_DTYPES:
            down, down_size = down + times, down_size + size
        elif ends[1] == FLOAT32 and ends[0] in COMPUTE_DTYPES:
            up, up_size = up + times, up_size + size
    return Casts(down, down_size, up, up_size)
