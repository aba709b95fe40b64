"""Which inputs of a program its products consume as weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..interpreters.after.provenance import entering, follow, leaving
from ..interpreters.compat import AnyJaxpr, aval_of, body_of
from ..interpreters.primitives import reading
from ..interpreters.primitives.held_contraction import held_jaxpr
from ..interpreters.primitives.structure import bodies
from ..policies import CONTRACTIONS, DATA_MOVEMENT

LIKELY, SURE, ACTIVATION = 1, 2, 4
_COMPUTED, _CONSTANT = -1, -2
_MOVES = DATA_MOVEMENT | {"concatenate", "stack"}


def read_as_weights(jaxpr: AnyJaxpr) -> dict[int, int]:
    """Returns how products consume each input: a union of `LIKELY`, `SURE` and `ACTIVATION`.

    A product that multiplies a computed value with an input as it is, and with no batch, consumes
    a weight: `SURE`. So does a convolution with its kernel. Of two inputs the second is a weight,
    as in ``x @ w``, or the matrix where the other is a vector: `LIKELY`; the other one is an
    `ACTIVATION`.

    Args:
        jaxpr: The closed jaxpr of the program, as it was traced.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> f = lambda x, v, w: jnp.tanh(x @ w) @ v
        >>> read_as_weights(jax.make_jaxpr(f)(*[jnp.ones((2, 2))] * 3))
        {2: 1, 0: 4, 1: 2}
    """
    found: dict[int, int] = {}
    _look(jaxpr, range(len(body_of(jaxpr).invars)), found)
    return found


def _look(jaxpr: AnyJaxpr, inputs: Sequence[int], found: dict[int, int]) -> list[int]:
    def step(_: int, eqn: Any, given: list[int]) -> Sequence[int]:
        name, held = eqn.primitive.name, bodies(eqn)
        if name in CONTRACTIONS:
            _read(eqn, given, found)
        elif (product := held_jaxpr(eqn)) is not None:
            _look(product, given[: len(body_of(product).invars)], found)
        results = [_COMPUTED] * len(eqn.outvars)
        for body in held:
            outputs = _look(body.jaxpr, entering(body, given, _COMPUTED), found)
            if len(held) == 1:
                results = leaving(body, outputs, _COMPUTED, len(eqn.outvars))
        if name in _MOVES or reading.cast_dtype(eqn) is not None:
            moved = {at for at in given if at != _CONSTANT}
            # Indices and what is put in make a computed value of it.
            results = [moved.pop() if len(moved) == 1 else _COMPUTED] * len(results)
        return results

    return follow(jaxpr, inputs, _CONSTANT, step)


def _read(eqn: Any, given: Sequence[int], found: dict[int, int]) -> None:
    """Adds to what is known of the operands of a product."""
    left, right = given[:2]
    ranks = [aval_of(v).ndim for v in eqn.invars[:2]]
    if eqn.primitive.name == "conv_general_dilated":
        weights = {right: SURE}
    elif eqn.primitive.name == "dot_general" and reading.dot_dimensions(eqn)[1][0]:
        return  # of a batch: attention, a cache
    elif left >= 0 and right >= 0:
        weight, other = (left, right) if ranks == [2, 1] else (right, left)
        weights = {weight: LIKELY, other: ACTIVATION}
    else:
        weights = {left: SURE, right: SURE}
    if min(ranks) > 1 and aval_of(eqn.outvars[0]).ndim == 0:
        return  # a sum of products of elements, as of labels and logarithms
    for at, how in weights.items():
        if at >= 0 and _CONSTANT not in (left, right):
            found[at] = found.get(at, 0) | how
