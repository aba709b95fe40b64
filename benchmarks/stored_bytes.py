"""Compares the bytes that `cast_params` stores with those of 16-bit inference written by hand.

    python benchmarks/stored_bytes.py

The models are the four of `vs_handwritten.py` in their sizes for a GPU; nothing runs: only shapes
are looked at. By hand, all parameters are stored in 16 bits but the scales and biases of norms,
which compute in float32, as the layers of Flax with ``dtype=`` do. For each level the table has
the bytes of `cast_params` over those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from comparison.cases import SIZES, Case, forward
from comparison.tables import as_markdown

from jmp_autocast import Policy, cast_params

LEVELS = ("tensor_cores", "o1", "compute")


def shapes_of(case: Case) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the forward pass of a model, and the shapes of its parameters and its batch."""
    model = case.build()
    dtype = jnp.int32 if len(case.inputs) == 2 else jnp.float32
    inputs = jax.ShapeDtypeStruct(case.inputs, dtype)
    state: Any = dict(jax.eval_shape(model.init, jax.random.key(0), inputs))
    params = state.pop("params")
    batch = {"inputs": inputs, "state": state}
    return lambda params, batch: forward(model, params, batch)[0], params, batch


def by_hand(params: Any) -> int:
    """Returns the bytes of parameters that are stored in 16 bits by hand."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(leaf.size * (4 if is_of_norm(path) else 2) for path, leaf in leaves)


def is_of_norm(path: Any) -> bool:
    """Whether a parameter is the scale or the bias of a norm."""
    return "norm" in jax.tree_util.keystr(path).lower()


def nbytes(params: Any) -> int:
    """Returns the bytes of arrays, or of shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def row(case: Case, dtype: str) -> list[str]:
    """Returns a row of the table."""
    fn, params, batch = shapes_of(case)
    hand, found = by_hand(params), []
    for level in LEVELS:
        policy = Policy(dtype, level=level)
        small = cast_params(fn, params, batch, policy=policy)
        found.append(f"{nbytes(small) / hand:.3f}")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return [case.name, dtype, f"{count:,}", *found]


def main() -> None:
    """Prints the table."""
    table = [["model", "dtype", "parameters", *LEVELS]]
    for case in SIZES["large"]:
        table += [row(case, dtype) for dtype in ("bfloat16", "float16")]
    print(as_markdown(table))


if __name__ == "__main__":
    main()
