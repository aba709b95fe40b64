"""The dtype of a function's results, apart from that of the state which it returns beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..policies import COMPUTE_DTYPES, FLOAT32, as_dtype, as_policy


def output_dtype_apart(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Takes the output dtype out of the options of `autocast`, and out of their policy.

    Args:
        options: Options that `jmp_autocast.autocast` has checked.

    Returns:
        The options with the output dtype ``"same"`` or ``"computed"``, and the output dtype that
        they asked for.

    Example:
        >>> output_dtype_apart(
        ...     {"policy": "compute=bfloat16,output=float16", "output_dtype": "same"}
        ... )
        ({'policy': Policy(compute_dtype=dtype(bfloat16), ...), 'output_dtype': 'same'},
         dtype('float16'))
    """
    options, wanted = dict(options), options["output_dtype"]
    if options["policy"] is not None:
        policy = as_policy(options["policy"])
        if policy.output_dtype is not None and is_named(wanted, "same"):
            wanted = policy.output_dtype
        options["policy"] = dataclasses.replace(policy, output_dtype=None)
    if not is_named(wanted, "same") and not is_named(wanted, "computed"):
        wanted = as_dtype(wanted, "output_dtype")
    options["output_dtype"] = "computed" if is_named(wanted, "computed") else "same"
    return options, wanted


def is_named(option: Any, name: str) -> bool:
    """True if an option is this string; an option may also be a dtype."""
    return isinstance(option, str) and option == name


def dtypes_of(tree: Any) -> list[Any]:
    """Returns the dtypes of a tree's leaves, None for what is no array."""
    return [getattr(x, "dtype", None) for x in jax.tree_util.tree_leaves(tree)]


def cast_leaves(tree: Any, dtypes: Sequence[Any]) -> Any:
    """Returns the tree with its float32 and 16-bit leaves in the given dtypes."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    floats = (FLOAT32, *COMPUTE_DTYPES)
    cast = [
        x.astype(dtype) if getattr(x, "dtype", None) in floats and dtype in floats else x
        for x, dtype in zip(leaves, dtypes, strict=True)
    ]
    return jax.tree_util.tree_unflatten(structure, cast)


def cast_outputs(out: Any, wanted: Any) -> Any:
    """Casts results to the dtype that `output_dtype_apart` found, if it is one."""
    return out if isinstance(wanted, str) else cast_leaves(out, [wanted] * len(dtypes_of(out)))
