"""Gives the outputs of a call their dtypes, and refuses outputs that hold tracers."""

from __future__ import annotations

import types
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..interpreters import Request
from ..interpreters.compat import Tracer, is_array_aval, set_weak_type
from ..interpreters.plan.avals import float_dtype
from ..policies import FLOAT_DTYPES, Policy, listed
from ..policies.dtypes import find_dtype
from ..policies.errors import shown

OutputDtype: TypeAlias = Literal["same", "computed"] | DTypeLike
"""``"same"`` for declared dtypes, ``"computed"`` for computed dtypes, or one dtype."""

_NUMBERS = bool, int, float, complex, np.generic, np.ndarray


def check_output_dtype(value: Any, policy: Policy) -> Any:
    """Returns ``output_dtype`` as a word or a dtype; raises ValueError for any other value.

    Args:
        value: The value of the option.
        policy: The policy, whose output dtype replaces ``"same"``.
    """
    if isinstance(value, str) and value in ("same", "computed"):
        return policy.output_dtype if value == "same" and policy.output_dtype else value
    dtype = find_dtype(value)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"output_dtype must be 'same', 'computed', {listed(FLOAT_DTYPES)}, got "
            f"{shown(value) if dtype is None else dtype.name}. It is one dtype for all float "
            "outputs: cast single results in the function."
        )
    return dtype


def request_of(aval: Any, output_dtype: Any) -> Request:
    """Returns the `Request` that tells the planner the dtype of an output of the program.

    Args:
        aval: The aval of the output.
        output_dtype: ``"same"``, ``"computed"`` or a dtype.
    """
    # Only float32 and 16-bit arrays are cast.
    declared = float_dtype(aval)
    if declared is None or output_dtype == "computed":
        return Request()
    return Request(dtype=declared if output_dtype == "same" else output_dtype)


def as_traced(x: Any, aval: Any, output_dtype: Any) -> Any:
    """Returns an output as a JAX array with the weak type that the function's output declares.

    Args:
        x: The output of the rewritten program.
        aval: The aval of the output in the traced function.
        output_dtype: ``"same"``, ``"computed"`` or a dtype.
    """
    # An output such as `jnp.zeros(())` is a literal of the jaxpr, which is a NumPy or Python
    # number. It becomes a JAX array, unless it is a float0, of which JAX has no arrays.
    if isinstance(x, _NUMBERS) and getattr(x, "dtype", None) != jax.dtypes.float0:
        x = jnp.asarray(x)
    # The rewritten program may lose the weak type of an output. It is restored, because otherwise
    # the caller's arithmetic with the output could promote to another dtype.
    found = jax.typeof(x)
    if not isinstance(output_dtype, str) or not is_array_aval(aval) or found.dtype != aval.dtype:
        return x
    return x if found.weak_type == aval.weak_type else set_weak_type(x, aval)


_DEPTH = 4
"""How many levels of nested attributes of a returned object are searched for tracers."""


def check_returned(leaf: Any, name: str) -> None:
    """Raises TypeError if a leaf of a result is an object that holds a tracer.

    `autocast` returns strings, numbers and functions unchanged, while `jax.jit` refuses them. But a
    tracer inside a returned object would never be replaced by its value.

    Args:
        leaf: A leaf of the function's result.
        name: The function's name.
    """
    if _holds_tracer(leaf, _DEPTH, set()):
        raise TypeError(
            f"autocast({name}) traced a function that returns a {type(leaf).__qualname__}, which "
            "holds arrays and is not a valid JAX type. Return arrays in a pytree: a dict, a tuple, "
            "a NamedTuple or a class registered with jax.tree_util.register_dataclass. Build "
            "modules outside autocast."
        )


def _holds_tracer(value: Any, depth: int, seen: set[int]) -> bool:
    if isinstance(value, Tracer):
        return True
    if depth == 0 or id(value) in seen or isinstance(value, type | types.ModuleType):
        return False
    seen.add(id(value))
    leaves = jax.tree.leaves(getattr(value, "__dict__", None))
    return any(_holds_tracer(leaf, depth - 1, seen) for leaf in leaves)
