"""Reading a jaxpr: its equations and those inside them, how often they run, bytes, casts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from ...interpreters.compat import body_of
from ...interpreters.plan.symbolic_sizes import element_count
from ...policies import COMPUTE_DTYPES, CONTRACTIONS, FLOAT32, STRUCTURAL


def equations_in(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields each equation of a jaxpr and of those inside it, and how often it runs.

    How often a ``while`` runs is unknown: its inside counts once.

    Args:
        jaxpr: An open or closed jaxpr.
        times: How often it runs.
    """
    for eqn in body_of(jaxpr).eqns:
        yield eqn, times
        for inner in jaxprs_of(eqn):
            yield from equations_in(inner, times * iterations(eqn))


def jaxprs_of(eqn: Any) -> list[Any]:
    """Returns the jaxprs that an equation runs, not the scalar ones of scatters and reductions.

    Nor that of an accumulating contraction, which `contraction_in` reads.
    """
    if eqn.primitive.name not in STRUCTURAL or eqn.primitive.name == "accumulate":
        return []
    values = eqn.params.values()
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in flat if hasattr(body_of(x), "eqns")]


def contraction_in(eqn: Any) -> Any:
    """Returns the matmul or convolution of an equation that hands out its accumulator.

    Its jaxpr declares the dtype of a rounded result; the equation has the one that it returns.

    Args:
        eqn: The equation.

    Returns:
        The equation of the contraction, None for an equation of another kind.
    """
    if eqn.primitive.name != "accumulate":
        return None
    inner = body_of(eqn.params["jaxpr"]).eqns
    return next(e for e in inner if e.primitive.name in CONTRACTIONS)


def iterations(eqn: Any) -> int:
    """Returns how often what is inside an equation runs; for a ``while``, which no one knows, 1."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def nbytes_of(atom: Any, dtype: str | None = None) -> int:
    """Returns the bytes of a variable or literal, 0 for what is no array.

    Args:
        atom: The variable or literal.
        dtype: The name of the dtype that it has, None for the one it declares.
    """
    declared = getattr(atom.aval, "dtype", None)
    if declared is None:
        return 0
    item = declared if dtype in (None, str(declared)) else jnp.dtype(dtype)
    return element_count(atom) * item.itemsize


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


def count_casts(jaxpr: Any) -> Casts:
    """Counts the casts of a jaxpr and of those inside it.

    Args:
        jaxpr: An open or closed jaxpr.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> count_casts(jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16))(jnp.ones(3)))
        Casts(down=1, down_nbytes=18, up=0, up_nbytes=0)
    """
    down = down_nbytes = up = up_nbytes = 0
    for eqn, times in equations_in(jaxpr):
        if eqn.primitive.name != "convert_element_type":
            continue
        (operand,), (result,) = eqn.invars, eqn.outvars
        source, target = operand.aval.dtype, result.aval.dtype
        nbytes = times * (nbytes_of(operand) + nbytes_of(result))
        if source == FLOAT32 and target in COMPUTE_DTYPES:
            down, down_nbytes = down + times, down_nbytes + nbytes
        elif target == FLOAT32 and source in COMPUTE_DTYPES:
            up, up_nbytes = up + times, up_nbytes + nbytes
    return Casts(down, down_nbytes, up, up_nbytes)
