"""Infers the arguments that hold parameters: by dataflow, not by name.

Parameters have no vote in the choice of dtypes, so data that is taken for a parameter is rounded to
16 bits. Therefore an argument holds parameters only if a product consumes one of its arrays as a
weight. Biases and scales are in one argument with the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..interpreters.after.provenance import entering, follow, leaving
from ..interpreters.compat import AnyJaxpr, aval_of, body_of
from ..interpreters.plan.data import Source
from ..interpreters.primitives import reading
from ..interpreters.primitives.held_contraction import held_jaxpr
from ..interpreters.primitives.structure import bodies
from ..policies import CONTRACTIONS, DATA_MOVEMENT

LIKELY, SURE, ACTIVATION = 1, 2, 4
_MOVES = DATA_MOVEMENT | {"concatenate", "stack"}


def is_module(x: Any) -> bool:
    """Returns whether a value is a callable pytree, such as an Equinox model."""
    return callable(x) and not jax.tree_util.all_leaves([x])


def root_of(path: str) -> str:
    """Returns the position, or the keyword, of the argument that a path begins with."""
    return path.split("/", 1)[0]


def with_weights(
    paths: Sequence[str], known: Sequence[Source], traced: AnyJaxpr
) -> Sequence[Source]:
    """Returns the sources of a program's inputs, with the weights of its products as parameters.

    Args:
        paths: The path of each input, which begins with its argument.
        known: The source of each input: parameters for modules, else data.
        traced: The closed jaxpr of the program.
    """
    roots = list(map(root_of, paths))
    avals = [v.aval for v in body_of(traced).invars]
    # A lone array is more often data than a parameter; a tree of arrays may be a model.
    trees = {
        root
        for root, path, aval in zip(roots, paths, avals, strict=True)
        if "/" in path and jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)
    }
    modules = {root for root, s in zip(roots, known, strict=True) if s is Source.PARAM}
    if not (trees := trees - modules):
        return known
    found = read_as_weights(traced, roots)
    params: set[str] = set()
    # If a module holds parameters, or a product surely has a weight, likely weights do not count.
    for level in (SURE,) if modules else (SURE, LIKELY):
        if not params:
            weights = {root for root in trees if found.get(root, 0) & level}
            # A batch is consumed as a weight, too: in the gradient of the layer that it enters.
            params = {root for root in weights if not found[root] & ACTIVATION}
            params = params or (set() if modules else weights)
    sources = zip(roots, known, strict=True)
    return [Source.PARAM if root in params else source for root, source in sources]


class _Origin(NamedTuple):
    """The origin of a value.

    Args:
        root: The only argument that it depends on; None for several, or for none.
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
    in a product with a vector: `LIKELY`; and the other one is an `ACTIVATION`.

    Args:
        jaxpr: The closed jaxpr of the program, as it was traced.
        roots: The argument of each input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> f = lambda x, v, w: jnp.tanh(x @ w) @ v
        >>> read_as_weights(jax.make_jaxpr(f)(*[jnp.ones((2, 2))] * 3), "xvw")
        {'w': 1, 'x': 4, 'v': 2}
    """
    found: dict[str, int] = {}
    _visit(jaxpr, [_Origin(root, i) for i, root in enumerate(roots)], found)
    return found


def _visit(jaxpr: AnyJaxpr, inputs: Sequence[_Origin], found: dict[str, int]) -> list[_Origin]:
    def step(_: int, eqn: Any, given: list[_Origin]) -> Sequence[_Origin]:
        name, held = eqn.primitive.name, bodies(eqn)
        if name in CONTRACTIONS:
            _add_product(eqn, given, found)
        elif (product := held_jaxpr(eqn)) is not None:
            _visit(product, given[: len(body_of(product).invars)], found)
        results = [_joined(given)] * len(eqn.outvars)
        for body in held:
            outputs = _visit(body.jaxpr, entering(body, given, _MIXED), found)
            if len(held) == 1:
                results = leaving(body, outputs, _MIXED, len(eqn.outvars))
        if name in _MOVES or reading.cast_dtype(eqn) is not None:
            moved = {origin for origin in given if origin is not _CONSTANT}
            # With indices or an update as further operands, the result is a computed value.
            if len(moved) == 1:
                results = [moved.pop()] * len(results)
        return results

    return follow(jaxpr, inputs, _CONSTANT, step)


def _joined(given: Iterable[_Origin]) -> _Origin:
    roots = {origin.root for origin in given if origin is not _CONSTANT}
    return _Origin(roots.pop()) if len(roots) == 1 else _MIXED


def _add_product(eqn: Any, given: Sequence[_Origin], found: dict[str, int]) -> None:
    """Adds the uses of the operands of a product to ``found``."""
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
