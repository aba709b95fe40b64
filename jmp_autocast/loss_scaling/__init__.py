"""Loss scaling for float16 gradients, as optax transformations.

state.py      the scale itself: how it grows and backs off, and how gradients are unscaled
gradients.py  gradients of a scaled loss
transform.py  optax transformations that unscale, skip and adapt
reading.py    the scale and the skips out of any optimizer state
"""

from .gradients import FiniteGradients, finite_value_and_grad, scaled_value_and_grad
from .reading import loss_scale, select_on_finite, skipped_steps, step_skipped
from .state import LossScaleState, dynamic_loss_scale, static_loss_scale
from .transform import LossScalingState, dynamic_loss_scaling, static_loss_scaling

__all__ = [
    "FiniteGradients",
    "LossScaleState",
    "LossScalingState",
    "dynamic_loss_scale",
    "dynamic_loss_scaling",
    "finite_value_and_grad",
    "loss_scale",
    "scaled_value_and_grad",
    "select_on_finite",
    "skipped_steps",
    "static_loss_scale",
    "static_loss_scaling",
    "step_skipped",
]
