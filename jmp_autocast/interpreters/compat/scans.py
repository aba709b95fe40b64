"""The numbers of constants, carries and slices of a scan, whose parameters changed in JAX 0.11."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and carries of a scan.

    JAX 0.11 replaced ``num_consts`` and ``num_carry`` by the tree ``ft_in``.
    """
    if "ft_in" in params:
        consts, carry, _ = (len(tree) for tree in params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def scan_with_more(params: dict[str, Any], extra: int, scanned: int) -> dict[str, Any]:
    """Returns a scan's parameters for additional constants and additional scanned arrays."""
    if not extra and not scanned:
        return params
    if "ft_in" not in params:
        return dict(params, num_consts=params["num_consts"] + extra)
    consts, carries, xs = map(len, params["ft_in"].unpack())
    return dict(params, ft_in=_ft_in(consts + extra, carries, xs + scanned))


@functools.lru_cache(maxsize=1024)
def _ft_in(consts: int, carries: int, scanned: int) -> Any:
    """Returns the ``ft_in`` parameter of a scan with given numbers of operands."""

    def scan(held: Any, init: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            return [-c for c in carry], [-y for y in (*held, *x)]

        return jax.lax.scan(step, init, xs, length=1)

    with jax.disable_jit(False):
        closed = jax.make_jaxpr(scan)([1.0] * consts, [1.0] * carries, [np.ones(1)] * scanned)
    return next(eqn.params["ft_in"] for eqn in closed.eqns if eqn.primitive.name == "scan")
