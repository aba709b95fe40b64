"""Which arguments of a program its products consume as weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..interpreters.after.provenance import entering, follow, leaving
from ..interpreters.compat import AnyJaxpr, aval_of, body_of
from ..interpreters.primitives import reading
from ..interpreters.primitives.held_contraction import held_jaxpr
from ..interpreters.primitives.structure import bodies
from ..policies import CONTRACTIONS, DATA_MOVEMENT

LIKELY, SURE, ACTIVATION = 1, 2, 4
_MOVES = DATA_MOVEMENT | {"concatenate", "stack"}


class _Origin(NamedTuple):
    """Where a value comes from.

    Args:
        root: The one argument that it is computed from; None for several, or for none.
        input: The position of the input that it is, moved or cast; None for a computed value.
    """

    root: str | None
    input: int | None = None


_MIXED, _CONSTANT = _Origin(None), _Origin(None, -1)


def read_as_weights(jaxpr: AnyJaxpr, roots: Sequence[str]) -> dict[str, int]:
    """Returns how products consume each argument: a union of `LIKELY`, `SURE` and `ACTIVATION`.

    A product without a batch that multiplies a value of several arguments with one of a single
    argument, as a layer does, consumes a weight: `SURE`; so does a convolution with its kernel. If
    both are of a single argument, the second operand is the weight, as in ``x @ w``, or the matrix
    where the other operand is a vector: `LIKELY`; and the other one is an `ACTIVATION`.

    Args:
        jaxpr: The closed jaxpr of the program, as it was traced.
        roots: The argument that each input lies in.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> f = lambda x, v, w: jnp.tanh(x @ w) @ v
        >>> read_as_weights(jax.make_jaxpr(f)(*[jnp.ones((2, 2))] * 3), "xvw")
        {'w': 1, 'x': 4, 'v': 2}
    """
    found: dict[str, int] = {}
    _look(jaxpr, [_Origin(root, i) for i, root in enumerate(roots)], found)
    return found


def _look(jaxpr: AnyJaxpr, inputs: Sequence[_Origin], found: dict[str, int]) -> list[_Origin]:
    def step(_: int, eqn: Any, given: list[_Origin]) -> Sequence[_Origin]:
        name, held = eqn.primitive.name, bodies(eqn)
        if name in CONTRACTIONS:
            _read(eqn, given, found)
        elif (product := held_jaxpr(eqn)) is not None:
            _look(product, given[: len(body_of(product).invars)], found)
        results = [_joined(given)] * len(eqn.outvars)
        for body in held:
            outputs = _look(body.jaxpr, entering(body, given, _MIXED), found)
            if len(held) == 1:
                results = leaving(body, outputs, _MIXED, len(eqn.outvars))
        if name in _MOVES or reading.cast_dtype(eqn) is not None:
            moved = {origin for origin in given if origin != _CONSTANT}
            # Indices and what is put in make a computed value of it.
            if len(moved) == 1:
                results = [moved.pop()] * len(results)
        return results

    return follow(jaxpr, inputs, _CONSTANT, step)


def _joined(given: Iterable[_Origin]) -> _Origin:
    roots = {origin.root for origin in given if origin != _CONSTANT}
    return _Origin(roots.pop()) if len(roots) == 1 else _MIXED


def _read(eqn: Any, given: Sequence[_Origin], found: dict[str, int]) -> None:
    """Adds to what is known of the operands of a product."""
    left, right = given[:2]
    ranks = [aval_of(v).ndim for v in eqn.invars[:2]]
    if eqn.primitive.name == "dot_general" and reading.dot_dimensions(eqn)[1][0]:
        return  # of a batch: attention, a cache
    if min(ranks) > 1 and aval_of(eqn.outvars[0]).ndim == 0:
        return  # a sum of products of elements, as of labels and logarithms
    if _CONSTANT in (left, right):
        return
    weight, other = (left, right) if ranks == [2, 1] else (right, left)
    if eqn.primitive.name == "conv_general_dilated":
        kinds = {right: SURE}
    elif None in (left.root, right.root):
        kinds = {left: SURE, right: SURE}
    elif weight.input is None and other.input is not None:
        # ``x @ normalized(w)`` or ``w @ normalized(x)``.
        kinds = {weight: LIKELY, other: LIKELY}
    else:
        kinds = {weight: SURE if other.input is None else LIKELY, other: ACTIVATION}
    for origin, kind in kinds.items():
        if origin.root is not None:
            found[origin.root] = found.get(origin.root, 0) | kind
