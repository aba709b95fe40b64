"""Arguments and results that a policy stores in 16 bits: the program sees declared dtypes."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ..interpreters import Planner, Want
from ..interpreters.plan.data import Plan
from ..policies import Policy, domain, narrow_dtypes
from ..policies.callables import positional_names
from ..policies.errors import did_you_mean
from ..policies.storage import is_stored, unmatched_storage
from ..scopes import STORED, mark
from .arguments import Call


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for an array, among the other leaves of what a function returns."""

    index: int


def argument_names(fn: Callable[..., Any], paths: Sequence[str]) -> list[str]:
    """Returns paths with the names of arguments in place of their positions, as far as known.

    Args:
        fn: The function.
        paths: Paths of arrays in its arguments.

    Example:
        >>> argument_names(lambda params, cache: None, ["1/k"])
        ['cache/k']
    """
    names = positional_names(fn)

    def with_name(path: str) -> str:
        first, *rest = path.split("/")
        is_named = first.isdigit() and int(first) < len(names)
        return "/".join([names[int(first)] if is_named else first, *rest])

    return [with_name(path) for path in paths]


def as_stored(call: Call, policy: Policy, fn: Any) -> tuple[Call, set[str]]:
    """Returns a call whose program reads and returns in 16 bits what is stored so.

    Args:
        call: The call.
        policy: Its policy.
        fn: The function, for the names of its arguments.

    Returns:
        The call, and a set which gets the paths of what it takes and returns.
    """
    if not policy.storage:
        return call, set()
    dtype, wide = np.dtype(policy.compute_dtype), policy.wide_dtype
    names = argument_names(fn, call.paths)
    paths = {*call.paths, *names}
    pairs = zip(call.paths, names, strict=True)
    stored = [is_stored(policy.storage, pair) for pair in pairs]
    traceable = call.traceable

    @functools.wraps(traceable)
    def program(*arrays: Any) -> list[Any]:
        # What is given in 16 bits is float32 to the program, which may have no other word for it.
        given = [
            _cast(x if x.dtype != wide else _cast(x, dtype), wide)
            if is_here and x.dtype in domain(wide)
            else x
            for x, is_here in zip(arrays, stored, strict=True)
        ]
        outputs = traceable(*given)
        out = call.unflatten([Slot(i) for i in range(len(outputs))])
        found, _ = jax.tree_util.tree_flatten_with_path(out)
        slots = [(path, leaf.index) for path, leaf in found if isinstance(leaf, Slot)]
        for path, i in slots:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            name = f"result/{name}".rstrip("/")
            paths.add(name)
            if is_stored(policy.storage, [name]) and outputs[i].dtype == wide:
                outputs[i] = _cast(outputs[i], dtype)
        return outputs

    return dataclasses.replace(call, traceable=program), paths


def _cast(x: Any, dtype: Any) -> Any:
    with jax.named_scope(mark(STORED)):
        return lax.convert_element_type(x, dtype)


def wants_of_stored(
    planner: Planner, plan: Plan, wants: Sequence[Want], wanted: Sequence[Any]
) -> list[Want]:
    """Returns what is asked of outputs: what was made of a stored argument goes back as it is.

    Args:
        planner: The planner.
        plan: A plan of the program that asks nothing of its outputs.
        wants: What is asked of each.
        wanted: What the caller asks of it: ``"same"`` or another word or dtype.
    """
    narrow = narrow_dtypes(planner.policy.wide_dtype)
    return [
        Want(dtype=state.dtype)
        if asked == "same" and state.is_stored and state.dtype in narrow
        else want
        for want, state, asked in zip(wants, plan.outputs, wanted, strict=True)
    ]


def report_unmatched_storage(policy: Policy, paths: Collection[str], name: str) -> None:
    """Warns about patterns of what is stored that match nothing in a program.

    Args:
        policy: The policy.
        paths: The paths of the program.
        name: Its name.
    """
    if not (patterns := unmatched_storage(policy.storage, paths)):
        return
    known = sorted({part for path in paths for part in path.split("/") if not part.isdigit()})
    found = did_you_mean(patterns[0].strip("*/"), known)
    found = found or f" Its paths are {', '.join(sorted(paths)[:8])}."
    warnings.warn(
        f"{name} has no argument, result or carry whose path matches "
        f"{', '.join(map(repr, patterns))}: it is stored as declared.{found}",
        stacklevel=4,
    )
