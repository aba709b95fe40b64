"""Reading a jaxpr: its equations and those inside them, how often they run, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from ...interpreters.compat import body_of
from ...interpreters.sizes import size
from ...policies import CONTRACTIONS, STRUCTURAL


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


def bytes_of(atom: Any, dtype: str | None = None) -> int:
    """Returns the bytes of a variable or literal, 0 for what is no array.

    Args:
        atom: The variable or literal.
        dtype: The name of the dtype that it has, None for the one it declares.
    """
    declared = getattr(atom.aval, "dtype", None)
    if declared is None:
        return 0
    item = declared if dtype in (None, str(declared)) else jnp.dtype(dtype)
    return size(atom) * item.itemsize
