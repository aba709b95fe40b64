"""The options of `autocast`, which are checked once, when a function is wrapped."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..backend import Choice, default_device, preferred_for
from ..interpreters.compat import Tracer, mark_frames
from ..interpreters.keep.choice import DECLARED, ResidualChoice
from ..policies import Policy, as_policy
from ..policies.dtypes import is_default
from ..policies.errors import shown
from . import arguments
from .outputs import check_output_dtype
from .switch import is_switched_off

mark_frames(__file__)


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked options of a wrapper, compared and hashed by value.

    Args:
        policy: The policy.
        params: The result of `arguments.check_params`.
        output_dtype: ``"same"``, ``"computed"`` or a dtype.
        enabled: Whether the wrapper casts.
        residuals: The choice of `keep_less`: how much is kept for the backward pass.
    """

    policy: Policy
    params: Any
    output_dtype: Any
    enabled: bool
    residuals: ResidualChoice = DECLARED

    @property
    def is_on(self) -> bool:
        """Whether a call would be cast now, given the option and the environment variable."""
        return self.enabled and not is_switched_off()

    @property
    def chosen(self) -> tuple[Policy, Choice | None]:
        """The policy with a compute dtype, and the device's `Choice` if the policy names none."""
        # JAX's devices are first used here: at wrap time, `jax.distributed` may not be set up yet.
        if not is_default(self.policy.compute_dtype):
            return self.policy, None
        choice = preferred_for(default_device())
        return dataclasses.replace(self.policy, compute_dtype=choice.dtype), choice


def autocast_options(
    policy: Any = None,
    params: Any = None,
    output_dtype: Any = "same",
    enabled: Any = True,
) -> Options:
    """Checks and normalizes the options of `autocast`."""
    # A traced bool gets an error of its own, because "must be a bool" would not help.
    if isinstance(enabled, Tracer):
        raise TypeError(
            f"enabled must be known when the program is traced, got the traced value {enabled}. "
            "Make it a static argument, or choose between two functions with jax.lax.cond."
        )
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool, got {shown(enabled)}.")
    params = arguments.check_params(params)
    policy = Policy() if policy is None else as_policy(policy)
    return Options(policy, params, check_output_dtype(output_dtype, policy), enabled)
