"""What the default backend makes of products in 8 bits."""

from __future__ import annotations

import warnings
from typing import Any

import jax

from ...policies import Policy, as_recipe, may_use_float8
from ..compat import compute_capability

_EMULATE = "Float8(emulate=True) rounds to 8 bits on any backend, for studies."


def default_device() -> Any:
    """Returns the device that a program runs on where nobody chooses another."""
    return jax.devices()[0]


def refusal() -> str:
    """Returns why the default backend shall not get 8-bit products, "" where it may.

    A GPU without units for them converts the operands to float16, and XLA removes casts to 8 bits
    on the way: neither 8-bit speed nor 8-bit rounding is left. An NVIDIA GPU needs compute
    capability 8.9, an AMD GPU gfx94 or later.
    """
    device = default_device()
    if device.platform != "gpu" or _has_units(compute_capability(device)):
        return ""
    return f"{device.device_kind} has no float8 units"


def _has_units(capability: str) -> bool:
    """Returns whether a GPU multiplies in 8 bits.

    Example:
        >>> [_has_units(c) for c in ("8.0", "8.9", "10.0", "gfx90a", "gfx942")]
        [False, True, True, False, True]
    """
    if capability.startswith("gfx"):
        return capability.startswith(("gfx94", "gfx95", "gfx12"))
    major, _, minor = capability.partition(".")
    return (int(major), int(minor or 0)) >= (8, 9)


def warn_without_units(policy: Policy) -> None:
    """Warns where the default backend gains nothing from products that a policy asks for in 8 bits.

    Args:
        policy: The policy of the program.
    """
    if not may_use_float8(policy):
        return
    recipe = as_recipe(policy.matmul)
    if recipe is not None and recipe.emulate:
        return
    device = default_device()
    if cause := refusal():
        message = f"{cause}: its matrix products stay in {policy.compute_dtype}"
    elif device.platform == "cpu":
        message = "A CPU has no float8 units: products run with 8-bit rounding, and slower"
    elif device.platform == "tpu" and "7" not in device.device_kind:
        message = f"{device.device_kind} has no float8 units that are known: nothing is gained"
    else:
        return
    warnings.warn(
        f'{message}. Leave matmul="float8" out of the policy here: bfloat16 is faster. {_EMULATE}',
        stacklevel=5,
    )
