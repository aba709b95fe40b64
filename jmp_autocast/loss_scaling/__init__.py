"""Loss scaling for float16 gradients.

scale.py            the scale itself: what it starts with, how it grows and backs off
unscale.py          the division of gradients by the scale, and the check that they are finite
gradients.py        gradients of a scaled loss
optax_wrapper.py    optax transformations that unscale, skip a bad step and adapt the scale
find_state.py       reads the scale and the skips out of any optimizer state
integer_leaves.py   updates of integer parameters, whose gradients are float0
progress.py         warns where one step after the other is skipped
check_step.py       whether a training step depends on the scale, as one with a mistake does
check_arguments.py  errors for arguments that are wrong
"""

from .check_step import check_step
from .find_state import (
    consecutive_skips,
    loss_scale,
    select_on_finite,
    skipped_steps,
    step_skipped,
)
from .gradients import FiniteGradients, finite_value_and_grad, scaled_value_and_grad
from .optax_wrapper import LossScalingState, dynamic_loss_scaling, static_loss_scaling
from .progress import check_progress
from .scale import LossScale

__all__ = [
    "FiniteGradients",
    "LossScale",
    "LossScalingState",
    "check_progress",
    "check_step",
    "consecutive_skips",
    "dynamic_loss_scaling",
    "finite_value_and_grad",
    "loss_scale",
    "scaled_value_and_grad",
    "select_on_finite",
    "skipped_steps",
    "static_loss_scaling",
    "step_skipped",
]
