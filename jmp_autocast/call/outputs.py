"""``output_dtype``: what it may be, and which output gets which dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..interpreters import Want
from ..interpreters.compat import is_array_aval, set_weak_type
from ..interpreters.plan.float_dtypes import float_dtype
from ..policies import FLOAT_DTYPES, Policy, listed
from ..policies.dtypes import find_dtype

_NUMBERS = bool, int, float, complex, np.generic, np.ndarray


@dataclasses.dataclass(frozen=True)
class OutputDtypes:
    """A dtype for each part of what a function returns.

    Args:
        structure: The structure of the prefix that the user gave.
        leaves: ``"same"`` or a dtype for each of its leaves.
    """

    structure: Any
    leaves: tuple[Any, ...]

    def of_leaves(self, out: Any) -> list[Any]:
        """Returns ``"same"`` or a dtype for each leaf of what the function returned.

        Raises:
            ValueError: The structure is no prefix of that of ``out``.
        """
        try:
            parts = self.structure.flatten_up_to(out)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"output_dtype must be a prefix of what the function returns, which is "
                f"{jax.tree.structure(out)}, got {self.structure}. A leaf of output_dtype stands "
                "for all outputs below it."
            ) from error
        pairs = zip(self.leaves, parts, strict=True)
        return [dtype for dtype, part in pairs for _ in jax.tree.leaves(part)]


def check_output_dtype(value: Any, policy: Policy) -> Any:
    """Returns ``output_dtype`` as a word, a dtype or `OutputDtypes`.

    Args:
        value: What the user gave.
        policy: Its output dtype is meant by ``"same"``.

    Raises:
        ValueError: It has no such value.
    """
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda node: node is None)
    if jax.tree_util.treedef_is_leaf(structure) and leaves:
        return _word_or_dtype(value, policy)
    if any(isinstance(leaf, str) and leaf == "computed" for leaf in leaves):
        raise ValueError(
            f"output_dtype='computed' is for all outputs, got {value!r}. Name a dtype for each "
            "part, or 'same'."
        )
    return OutputDtypes(structure, tuple(_word_or_dtype(leaf, policy) for leaf in leaves))


def _word_or_dtype(value: Any, policy: Policy) -> Any:
    if isinstance(value, str) and value in ("same", "computed"):
        return policy.output_dtype if value == "same" and policy.output_dtype else value
    dtype = find_dtype(value)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"output_dtype must be 'same', 'computed', {listed(FLOAT_DTYPES)}, or a pytree of "
            f"'same' and dtypes, got {repr(value) if dtype is None else dtype.name}."
        )
    return dtype


def per_output(wanted: Any, unflatten: Callable[[Sequence[Any]], Any], count: int) -> list[Any]:
    """Returns what is wanted of each array that a function returns.

    Args:
        wanted: As `check_output_dtype` returned it.
        unflatten: From the arrays to what the function returns.
        count: The number of arrays.
    """
    if not isinstance(wanted, OutputDtypes):
        return [wanted] * count
    out = unflatten([Slot(i) for i in range(count)])
    pairs = zip(jax.tree.leaves(out), wanted.of_leaves(out), strict=True)
    return [dtype for leaf, dtype in pairs if isinstance(leaf, Slot)]


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for an array, among the other leaves of what a function returns."""

    index: int


def want_of(aval: Any, output_dtype: Any) -> Want:
    """Returns what is asked of the equation that makes an output.

    Args:
        aval: The type of the output.
        output_dtype: ``"same"``, ``"computed"`` or a dtype.
    """
    # What is no float32 or 16-bit array goes out as the program made it, whatever is asked for.
    declared = float_dtype(aval)
    if declared is None or output_dtype == "computed":
        return Want()
    return Want(dtype=declared if output_dtype == "same" else output_dtype)


def as_traced(x: Any, aval: Any, output_dtype: Any) -> Any:
    """Returns an output as the function's own is: a JAX array, of its weak type.

    Args:
        x: The output of the rewritten program.
        aval: The type of the function's own.
        output_dtype: ``"same"``, ``"computed"`` or the dtype that was asked for.
    """
    # `jnp.zeros(())` and `jnp.asarray(1.0)` are literals of a jaxpr, which are numbers of NumPy and
    # of Python, and have no `at` or `devices`, or no dtype. JAX has no array of float0.
    if isinstance(x, _NUMBERS) and getattr(x, "dtype", None) != jax.dtypes.float0:
        x = jnp.asarray(x)
    # An equation that is bound again may lose the weak type of its result, and a caller that adds
    # a Python number to a float16 output would get another dtype than before.
    found = jax.typeof(x)
    if not isinstance(output_dtype, str) or not is_array_aval(aval) or found.dtype != aval.dtype:
        return x
    return x if found.weak_type == aval.weak_type else set_weak_type(x, aval)
