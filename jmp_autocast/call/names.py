"""Errors for names that the package does not have, with their replacements."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from ..policies.retired import instead_of

_PACKAGES = "inspect", "loss_scaling", "optimizers", "quantize_params", "policies"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        # PyTorch
        "GradScaler": "dynamic_loss_scaling(optimizer), and scaled_value_and_grad(loss)",
        "amp": "autocast",
        "custom_fwd": "full_precision() inside the function",
        # jmp
        "DynamicLossScale": "dynamic_loss_scaling(optimizer)",
        "StaticLossScale": "static_loss_scaling(optimizer, scale)",
        "all_finite": "jmp_autocast.loss_scaling.step_skipped(opt_state)",
        "get_policy": "Policy(compute_dtype), or the string itself: autocast(fn, policy=...)",
        "cast_to_half": "cast_params(fn, params, *args)",
        "cast_to_full": "jmp_autocast.optimizers.as_float32(params)",
        # Keras and Flax
        "DTypePolicy": "Policy(compute_dtype)",
        "set_global_policy": "autocast(fn, policy=...) for each function",
        "mixed_precision": "autocast(fn, jnp.bfloat16)",
        "LossScaleOptimizer": "dynamic_loss_scaling(optimizer)",
        "DynamicScale": "dynamic_loss_scaling(optimizer), and scaled_value_and_grad(loss)",
        # Apex and others for JAX
        "initialize": "autocast(fn, jnp.float16)",
        "scale_loss": "scaled_value_and_grad(loss)(opt_state, params, ...)",
        "filter_value_and_grad": "jmp_autocast.integrations.equinox.scaled_value_and_grad",
        "force_full_precision": "full_precision() inside the function",
        # Transformer Engine and qwix
        "fp8_autocast": 'autocast(fn, policy=Policy(jnp.bfloat16, matmul="float8"))',
        "quantize_model": "quantize_params(fn, params, *args)",
    }
)
"""Names of other libraries, and their replacements here."""


def hint_for(name: str, package: str) -> str:
    """Returns a sentence with the module of a name, or its replacement; "" for unknown names.

    Example:
        >>> hint_for("Comparison", "jmp_autocast")
        'Write: from jmp_autocast.inspect import Comparison'
    """
    if name in INSTEAD:
        return f"Write {INSTEAD[name]}."
    if hint := instead_of(name):
        return hint.lstrip()
    for module in () if name.startswith("_") else _PACKAGES:
        if name in importlib.import_module(f"{package}.{module}").__all__:
            return f"Write: from {package}.{module} import {name}"
    return ""
