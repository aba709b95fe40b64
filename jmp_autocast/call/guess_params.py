"""Which arguments of a call hold parameters, where the user did not say: by dataflow, not by name.

Parameters have no vote in the choice of dtypes. Data taken for parameters would be rounded to 16
bits where it meets them, so nothing counts but that a product consumes an array as its weight.
Biases and scales are consumed by no product: they lie in one argument with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..interpreters.compat import AnyJaxpr, body_of
from ..interpreters.plan.data import Source
from .read_as_weights import ACTIVATION, LIKELY, SURE, read_as_weights


def is_module(x: Any) -> bool:
    """Returns whether a value is a pytree that is called, as a model of Equinox is."""
    return callable(x) and not jax.tree_util.all_leaves([x])


def root_of(path: str) -> str:
    """Returns the position, or the keyword, of the argument that a path begins with."""
    return path.split("/", 1)[0]


def with_weights(
    paths: Sequence[str], known: Sequence[Source], traced: AnyJaxpr
) -> Sequence[Source]:
    """Returns the sources of a program's inputs, with those that its products consume as weights.

    Args:
        paths: The path of each input: the argument that it lies in comes first.
        known: What each is: the parameters of modules are known, all else is data.
        traced: The closed jaxpr of the program.
    """
    avals = [v.aval for v in body_of(traced).invars]
    # A lone array is more often data than a parameter; a tree of arrays may be a model.
    trees = {
        root_of(path)
        for path, aval in zip(paths, avals, strict=True)
        if "/" in path and jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)
    }
    modules = {root_of(p) for p, s in zip(paths, known, strict=True) if s is Source.PARAM}
    if not (trees := trees - modules):
        return known
    found = read_as_weights(traced, list(map(root_of, paths)))
    params: set[str] = set()
    for level in (SURE, LIKELY):
        if not (params or (modules and level == LIKELY)):
            weights = {root for root in trees if found.get(root, 0) & level}
            # A batch is consumed as a weight, too: in the gradient of the layer that it enters.
            params = {root for root in weights if not found[root] & ACTIVATION}
            params = params or (set() if modules else weights)
    return [
        Source.PARAM if root_of(path) in params else source
        for path, source in zip(paths, known, strict=True)
    ]
