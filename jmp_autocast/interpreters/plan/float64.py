"""Where float64 may be: only where JAX has it."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from ...policies import FLOAT32, FLOAT64, Policy
from ..compat import body_of
from ..primitives.structure import equations_in
from .float_dtypes import is_in

_ENABLE = 'Call jax.config.update("jax_enable_x64", True) before the first array is made'


def _is_there() -> bool:
    return jax.dtypes.canonicalize_dtype(FLOAT64) == FLOAT64


def check_float64(policy: Policy) -> None:
    """Raises ValueError for a policy of float64 programs where JAX has no float64.

    Args:
        policy: The policy of a program that is traced now.
    """
    if policy.wide_dtype == FLOAT64 and not _is_there():
        raise ValueError(
            "compute_dtype=float32 is for programs in float64, and JAX makes no float64 arrays "
            f"while jax_enable_x64 is off. {_ENABLE}. For a float32 program use bfloat16 or "
            "float16, or pass enabled=False to run it without casts."
        )


def warn_without_float64(policy: Policy, jaxpr: Any, name: str) -> None:
    """Warns where a policy of float64 programs meets a program that holds no float64.

    Args:
        policy: The policy of the program.
        jaxpr: The closed jaxpr of the program.
        name: The name of the program.
    """
    if policy.wide_dtype != FLOAT64:
        return
    body = body_of(jaxpr)
    variables = [*body.constvars, *body.invars]
    variables += [v for eqn, _ in equations_in(jaxpr) for v in eqn.outvars]
    if not any(is_in(getattr(v.aval, "dtype", None), FLOAT64) for v in variables):
        warnings.warn(
            f"{name} holds no float64 array, and compute_dtype=float32 changes nothing in it. For "
            "a float32 program take bfloat16 or float16, or pass enabled=False.",
            stacklevel=5,
        )


def check_island(dtype: np.dtype, cause: str, compute_dtype: np.dtype) -> np.dtype:
    """Returns the dtype of an island, a region that is wider than the program.

    Args:
        dtype: What its scope asks for.
        cause: The scope, for messages.
        compute_dtype: The compute dtype of the policy.

    Raises:
        ValueError: JAX has no float64 now; or the dtype is no wider than the program.
    """
    # A pattern was checked with the policy that it belongs to; a mark in the code knew of none.
    if dtype != FLOAT64:
        raise ValueError(
            f"{cause} asks for {dtype} in a program with compute_dtype={compute_dtype}, which is "
            f"cast between {FLOAT64} and {FLOAT32}. Write one of these two."
        )
    if not _is_there():
        raise ValueError(
            f"{cause} asks for float64, and JAX makes no float64 arrays while jax_enable_x64 is "
            f"off. {_ENABLE}, or leave the scope out."
        )
    return dtype
