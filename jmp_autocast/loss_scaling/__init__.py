"""Loss scaling for float16 gradients.

optax_wrapper.py    optax transformations that unscale, skip a bad step and adapt the scale
gradients.py        gradients of a scaled loss
find_state.py       functions that read the scale and the skipped steps in an optimizer state
scale.py            the state of a scale, and its growth and backoff
unscale.py          the division of gradients by the scale, and the check that they are finite
float16_weights.py  float32 parameters and state for the optimizer of float16 parameters
check_arguments.py  errors for wrong arguments
"""

from .find_state import loss_scale, skipped_steps, step_skipped
from .gradients import scaled_value_and_grad
from .optax_wrapper import LossScalingState, dynamic_loss_scaling, static_loss_scaling

__all__ = [
    "LossScalingState",
    "dynamic_loss_scaling",
    "loss_scale",
    "scaled_value_and_grad",
    "skipped_steps",
    "static_loss_scaling",
    "step_skipped",
]
