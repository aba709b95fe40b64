"""The output dtype of a function that also returns state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..autocast import Options
from ..policies import FLOAT_DTYPES


def without_output_dtype(options: Options) -> Options:
    """Returns the options for a function that returns state beside its results.

    The state has to keep its dtypes, but an output dtype holds for all outputs. So the function
    runs with ``"same"`` or ``"computed"``, and `cast_outputs` casts its results alone.
    """
    output_dtype = "computed" if options.output_dtype == "computed" else "same"
    return dataclasses.replace(options, output_dtype=output_dtype)


def dtypes_of(tree: Any) -> list[Any]:
    """Returns the dtypes of a tree's leaves, None for other leaves than arrays."""
    return [getattr(x, "dtype", None) for x in jax.tree_util.tree_leaves(tree)]


def cast_leaves(tree: Any, dtypes: Sequence[Any]) -> Any:
    """Returns the tree with its float32 and 16-bit leaves in the given dtypes, None for no cast."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    # An integer or a key is no number to round, and a float64 or float8 leaf was declared so.
    cast = [
        x.astype(dtype) if {dtype, getattr(x, "dtype", None)} <= FLOAT_DTYPES else x
        for x, dtype in zip(leaves, dtypes, strict=True)
    ]
    return jax.tree_util.tree_unflatten(structure, cast)


def cast_outputs(out: Any, options: Options) -> Any:
    """Casts results to an output dtype; ``"same"`` and ``"computed"`` change nothing."""
    # "same" and "computed" are no dtypes, and cast nothing.
    return cast_leaves(out, [options.output_dtype] * len(dtypes_of(out)))
