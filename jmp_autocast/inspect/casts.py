"""The casts of a program, read from its jaxpr."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from ..interpreters.compat import body_of
from ..policies import COMPUTE_DTYPES, FLOAT32, STRUCTURAL


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
        size = times * math.prod(result.aval.shape) * 6  # 4 bytes at one end, 2 at the other
        if ends[0] == FLOAT32 and ends[1] in COMPUTE_DTYPES:
            down, down_size = down + times, down_size + size
        elif ends[1] == FLOAT32 and ends[0] in COMPUTE_DTYPES:
            up, up_size = up + times, up_size + size
    return Casts(down, down_size, up, up_size)


def equations_in(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields each equation of a jaxpr and of those inside it, and how often it runs.

    How often a ``while`` runs is unknown: its inside counts once.

    Args:
        jaxpr: An open or closed jaxpr.
        times: How often it runs.
    """
    for eqn in body_of(jaxpr).eqns:
        yield eqn, times
        repeated = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jaxprs_of(eqn):
            yield from equations_in(inner, repeated)


def jaxprs_of(eqn: Any) -> list[Any]:
    """Returns the jaxprs that an equation runs, not the scalar ones of scatters and reductions."""
    if eqn.primitive.name not in STRUCTURAL:
        return []
    values = eqn.params.values()
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in flat if hasattr(body_of(x), "eqns")]
