"""Automatic mixed precision for JAX by jaxpr rewriting.

What the functions of `jmp_autocast.inspect` return has its types there.
"""

from .inspect import (
    check_numerics,
    compare,
    explain,
    op_stats,
    tune,
)
from .loss_scaling import (
    LossScale,
    dynamic_loss_scaling,
    finite_value_and_grad,
    loss_scale,
    scaled_value_and_grad,
    select_on_finite,
    skipped_steps,
    static_loss_scaling,
    step_skipped,
)
from .policies import (
    BF16,
    FP8,
    FP16,
    CastPolicy,
    Decision,
    EquationView,
    Float8,
    Policy,
    register_policy,
)
from .residuals import keep_less
from .scopes import compute_precision, full_precision
from .stored_params import cast_params
from .transform import autocast

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "CastPolicy",
    "Decision",
    "EquationView",
    "Float8",
    "LossScale",
    "Policy",
    "autocast",
    "cast_params",
    "check_numerics",
    "compare",
    "compute_precision",
    "dynamic_loss_scaling",
    "explain",
    "finite_value_and_grad",
    "full_precision",
    "keep_less",
    "loss_scale",
    "op_stats",
    "register_policy",
    "scaled_value_and_grad",
    "select_on_finite",
    "skipped_steps",
    "static_loss_scaling",
    "step_skipped",
    "tune",
]
