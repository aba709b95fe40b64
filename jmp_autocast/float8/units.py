"""Whether the default backend has 8-bit matrix units."""

from __future__ import annotations

import warnings

from ..backend import default_device, has_float8_units
from ..policies import Float8, Policy, as_recipe, may_use_float8

_EMULATE = "Float8(emulate=True) rounds to 8 bits on any backend, for studies."


def refusal() -> str:
    """Returns the reason against 8-bit products on the default backend; "" if there is none.

    On a GPU without 8-bit units, XLA converts the operands to float16 and removes the casts to 8
    bits: neither 8-bit speed nor 8-bit rounding is left.
    """
    device = default_device()
    if device.platform != "gpu" or has_float8_units(device):
        return ""
    return f"{device.kind} has no float8 units"


def warn_without_units(policy: Policy) -> None:
    """Warns if a policy has 8-bit products and the default backend gains nothing from them."""
    if not may_use_float8(policy):
        return
    recipe = as_recipe(policy.matmul) or Float8()
    if recipe.emulate:
        return
    device = default_device()
    if cause := refusal():
        message = f"{cause}: its matrix products stay in {policy.compute_dtype}"
    elif device.platform == "cpu":
        message = "A CPU has no float8 units: products run with 8-bit rounding, and slower"
    elif device.platform == "tpu" and not has_float8_units(device):
        message = f"{device.kind} has no known float8 units: nothing is gained"
    else:
        return
    fix = 'Leave matmul="float8" out of the policy here: bfloat16 is faster.'
    warnings.warn(f"{message}. {fix} {_EMULATE}", stacklevel=5)
