"""Where float64 may be: only where JAX has it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from ...policies import FLOAT64, Policy
from ..compat import AnyJaxpr, body_of
from ..compat.settings import ENABLE_FLOAT64, has_float64
from ..primitives.structure import equations_in
from .float_dtypes import is_in


def check_float64(policy: Policy) -> None:
    """Raises ValueError for a policy of float64 programs where JAX has no float64.

    Args:
        policy: The policy of a program that is traced now.
    """
    if policy.wide_dtype == FLOAT64 and not has_float64():
        raise ValueError(
            "compute_dtype=float32 is for programs in float64, and JAX makes no float64 arrays "
            f"while jax_enable_x64 is off. {ENABLE_FLOAT64}. For a float32 program use bfloat16 or "
            "float16, or pass enabled=False to run it without casts."
        )


def check_outputs(wanted: Iterable[Any]) -> None:
    """Raises ValueError for outputs in float64 where JAX has no float64.

    Args:
        wanted: ``"same"``, ``"computed"`` or a dtype for each output.
    """
    if FLOAT64 in wanted and not has_float64():
        raise ValueError(
            "output_dtype asks for float64, and JAX makes no float64 arrays while jax_enable_x64 "
            f"is off. {ENABLE_FLOAT64}, or ask for float32."
        )


def warn_without_float64(policy: Policy, jaxpr: AnyJaxpr, name: str) -> None:
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
