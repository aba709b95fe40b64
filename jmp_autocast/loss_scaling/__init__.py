"""Loss scaling for float16 gradients.

scale.py            the scale itself: what it starts with, how it grows and backs off
unscale.py          the division of gradients by the scale, and the check that they are finite
gradients.py        gradients of a scaled loss
optax_wrapper.py    optax transformations that unscale, skip a bad step and adapt the scale
find_state.py       reads the scale and the skips out of any optimizer state
check_arguments.py  errors for arguments that are wrong
"""

from .find_state import loss_scale, select_on_finite, skipped_steps, step_skipped
from .gradients import FiniteGradients, finite_value_and_grad, scaled_value_and_grad
from .optax_wrapper import LossScalingState, dynamic_loss_scaling, static_loss_scaling
from .scale import LossScale

__all__ = [
    "FiniteGradients",
    "LossScale",
    "LossScalingState",
    "dynamic_loss_scaling",
    "finite_value_and_grad",
    "loss_scale",
    "scaled_value_and_grad",
    "select_on_finite",
    "skipped_steps",
    "static_loss_scaling",
    "step_skipped",
]
