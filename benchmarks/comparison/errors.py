"""Errors of a loss and its gradients against float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .cases import Case, Tree, group_of, plain_loss


def as_float64(tree: Tree) -> Tree:
    """Returns a tree of numpy arrays with its float arrays in float64."""
    return jax.tree.map(
        lambda x: np.asarray(x, np.float64) if np.asarray(x).dtype.kind == "f" else x, tree
    )


def references(case: Case, examples: Sequence[tuple[Tree, Tree]]) -> list[tuple[float, Tree]]:
    """Returns loss and gradients in float64 for each pair of parameters and batch."""
    with jax.enable_x64(True):
        loss = plain_loss(case.build(param_dtype=jnp.float64))
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        found = []
        for params, batch in examples:
            (value, _), grads = step(as_float64(params), as_float64(batch))
            assert all(g.dtype == np.float64 for g in (value, *jax.tree.leaves(grads)))
            found.append((float(value), jax.tree.map(np.asarray, grads)))
    return found


def errors(
    step: Callable[..., Any],
    examples: Sequence[tuple[Tree, Tree]],
    exact: Sequence[tuple[float, Tree]],
) -> dict[str, float]:
    """Returns relative errors, each the mean over the examples.

    Args:
        step: From parameters and a batch to a loss and its gradients.
        examples: Pairs of parameters and batch.
        exact: The float64 results for them.

    Returns:
        ``loss``: the relative error of the loss. For each group of parameters: the mean of the
        arrays' relative errors in the 2-norm.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for (params, batch), (value, reference) in zip(examples, exact, strict=True):
        loss, grads = step(params, batch)
        found["loss"].append(abs(float(loss) - value) / abs(value))
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        for (path, grad), truth in zip(leaves, jax.tree.leaves(reference), strict=True):
            difference = np.linalg.norm(np.asarray(grad, np.float64) - truth)
            found[group_of(path)].append(difference / np.linalg.norm(truth))
    return {name: float(np.mean(values)) for name, values in found.items()}
