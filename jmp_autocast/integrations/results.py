"""Applies an output dtype to the results of a function that also returns state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..autocast import Options
from ..policies import FLOAT_DTYPES


def without_output_dtype(options: Options) -> Options:
    """Returns the options with which a function that also returns state is run.

    An output dtype applies to all outputs, but state must keep its dtypes. So the function runs
    with ``"same"`` or ``"computed"``, and then `cast_outputs` casts only its results.
    """
    output_dtype = "computed" if options.output_dtype == "computed" else "same"
    return dataclasses.replace(options, output_dtype=output_dtype)


def dtypes_of(tree: Any) -> list[Any]:
    """Returns the dtype of each leaf of a tree; None for a leaf that is no array."""
    return [getattr(x, "dtype", None) for x in jax.tree_util.tree_leaves(tree)]


def cast_leaves(tree: Any, dtypes: Sequence[Any]) -> Any:
    """Casts the float32 and 16-bit leaves of a tree to the given dtypes; None is no cast."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    # Integers, keys, and float64 or float8 leaves are never cast.
    cast = [
        x.astype(dtype) if {dtype, getattr(x, "dtype", None)} <= FLOAT_DTYPES else x
        for x, dtype in zip(leaves, dtypes, strict=True)
    ]
    return jax.tree_util.tree_unflatten(structure, cast)


def cast_outputs(out: Any, options: Options) -> Any:
    """Casts results to the output dtype of the options, if it is a dtype."""
    # `cast_leaves` ignores "same" and "computed", which are no dtypes.
    return cast_leaves(out, [options.output_dtype] * len(dtypes_of(out)))
