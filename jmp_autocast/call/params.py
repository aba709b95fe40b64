"""Infers the arguments that hold parameters from the dataflow of the program, not from names.

Parameters have no vote in the choice of dtypes, so data that is mistaken for a parameter is rounded
to 16 bits. Therefore an argument counts only if a product consumes one of its arrays as a weight.
Biases and scales are usually in one argument with the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..interpreters.compat import AnyJaxpr, aval_of, body_of
from ..interpreters.plan.data import Source
from ..interpreters.plan.reads import entering, follow, leaving
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
    """Returns the argument of a path: its position or keyword, which is the part before a "/"."""
    return path.split("/", 1)[0]


def with_weights(
    paths: Sequence[str], known: Sequence[Source], traced: AnyJaxpr
) -> Sequence[Source]:
    """Returns whether each input is a parameter or data; arguments with weights are parameters.

    Args:
        paths: The path of each input, which begins with its argument's position or keyword.
        known: For each input, a parameter if a module in the arguments holds it, else data.
        traced: The closed jaxpr of the program.
    """
    roots = list(map(root_of, paths))
    avals = [v.aval for v in body_of(traced).invars]
    # An argument that is one array is usually data; a tree of arrays may be a model.
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
    # Arguments with a sure weight win. Arguments with a likely weight count only if there is no
    # sure weight and no module.
    for level in (SURE,) if modules else (SURE, LIKELY):
        if not params:
            weights = {root for root in trees if found.get(root, 0) & level}
            # The product for the gradient of a layer's weight consumes the batch like a weight, so
            # an argument that is also an activation does not count.
            params = {root for root in weights if not found[root] & ACTIVATION}
            params = params or (set() if modules else weights)
    sources = zip(roots, known, strict=True)
    return [Source.PARAM if root in params else source for root, source in sources]


class _Origin(NamedTuple):
    """The input or argument that a value comes from.

    Args:
        root: The one argument that the value depends on; None if it depends on several or none.
        input: If the value is an input, possibly moved or cast, the input's position; None for a
            computed value.
    """

    root: str | None
    input: int | None = None


_MIXED, _CONSTANT = _Origin(None), _Origin(None, -1)


def read_as_weights(jaxpr: AnyJaxpr, roots: Sequence[str]) -> dict[str, int]:
    """Returns how products consume each argument, as flags: `LIKELY`, `SURE`, `ACTIVATION`.

    If one operand depends on several arguments and the other operand on a single argument, as in a
    layer, the single argument is a `SURE` weight. So is the kernel of a convolution. If each
    operand depends on a single argument, the second operand is the weight, as in ``x @ w`` (in a
    product of a matrix and a vector, the matrix is), and the first operand is an `ACTIVATION`. This
    weight is `SURE` if the activation is computed, else `LIKELY`. Products with batch dimensions do
    not count.

    Args:
        jaxpr: The closed jaxpr of the program, as it was traced.
        roots: The argument that each input belongs to.

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
        name = eqn.primitive.name
        if name in _MOVES or reading.cast_dtype(eqn) is not None:
            moved = {origin for origin in given if origin is not _CONSTANT}
            # If another operand, such as indices, comes from an input, the result is a computed
            # value.
            return [moved.pop() if len(moved) == 1 else _joined(given)] * len(eqn.outvars)
        if name in CONTRACTIONS:
            _add_product(eqn, given, found)
        elif (product := held_jaxpr(eqn)) is not None:
            _visit(product, given[: len(body_of(product).invars)], found)
        results = [_joined(given)] * len(eqn.outvars)
        for body in (held := bodies(eqn)):
            outputs = _visit(body.jaxpr, entering(body, given, _MIXED), found)
            if len(held) == 1:
                results = leaving(body, outputs, _MIXED, len(eqn.outvars))
        return results

    return follow(jaxpr, inputs, _CONSTANT, step)


def _joined(given: Iterable[_Origin]) -> _Origin:
    roots = {origin.root for origin in given if origin is not _CONSTANT}
    return _Origin(roots.pop()) if len(roots) == 1 else _MIXED


def _add_product(eqn: Any, given: Sequence[_Origin], found: dict[str, int]) -> None:
    """Adds to ``found`` how a product consumes its operands."""
    left, right = given[:2]
    ranks = [aval_of(v).ndim for v in eqn.invars[:2]]
    if eqn.primitive.name == "dot_general" and reading.dot_dimensions(eqn)[1][0]:
        return  # a product with batch dimensions, as in attention
    if min(ranks) > 1 and aval_of(eqn.outvars[0]).ndim == 0:
        return  # an inner product of arrays, such as labels and logarithms
    if _CONSTANT in (left, right):
        return
    weight, other = (left, right) if ranks == [2, 1] else (right, left)
    if eqn.primitive.name == "conv_general_dilated":
        kinds = {right: SURE}
    elif None in (left.root, right.root):
        kinds = {left: SURE, right: SURE}
    elif weight.input is None and other.input is not None:
        # Either operand may be the weight: ``x @ normalized(w)``, or ``w @ normalized(x)``.
        kinds = {weight: LIKELY, other: LIKELY}
    else:
        kinds = {weight: SURE if other.input is None else LIKELY, other: ACTIVATION}
    for origin, kind in kinds.items():
        if origin.root is not None:
            found[origin.root] = found.get(origin.root, 0) | kind
