"""The options of `autocast`, checked once, when a function is wrapped or a tool is called."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ..backend import Choice, choose_for, default_device, preferred_for
from ..compiler_options import asks_for_onednn
from ..interpreters.compat import Tracer, mark_frames
from ..interpreters.keep.choice import ResidualChoice, as_choice
from ..policies import FLOAT32, Policy, as_policy
from ..policies.choices import Level
from ..policies.dtypes import DEFAULT, as_compute_dtype, find_dtype, is_default
from ..policies.errors import shown
from . import arguments
from .outputs import check_output_dtype
from .switch import is_switched_off

mark_frames(__file__)

OnUnknown = Literal["keep", "warn", "error"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked options of a wrapper; equal options are equal and hash the same.

    Args:
        policy: The policy.
        params: As `arguments.check_params` returned it.
        output_dtype: ``"same"``, ``"computed"``, a dtype or `OutputDtypes`.
        enabled: False where nothing is cast.
        on_unknown: What happens to a primitive without a rule.
        residuals: How much is kept for the backward pass, and where.
        auto: The backend chooses the compute dtype, or that nothing is lowered, and not the policy.
        onednn: The program is compiled with oneDNN's convolutions.
    """

    policy: Policy
    params: Any
    output_dtype: Any
    enabled: bool
    on_unknown: OnUnknown
    residuals: ResidualChoice
    auto: bool = False
    onednn: bool = False

    @property
    def is_on(self) -> bool:
        """Whether a call that is traced now is cast: nobody said no, nor the environment."""
        return self.enabled and not is_switched_off()

    @property
    def asks(self) -> bool:
        """Whether the backend is asked for the compute dtype."""
        return self.auto or is_default(self.policy.compute_dtype)

    @property
    def chosen(self) -> tuple[Policy, Choice | None]:
        """The policy of a program that is traced now, and what the backend chose, None if unasked.

        Where that is no 16-bit dtype, the policy holds for scopes that name one.
        """
        # Not before: `jax.distributed` has to be set up before a device is asked for.
        if not self.asks:
            return self.policy, None
        policy = with_compute_dtype(self.policy)
        if not self.auto:
            return policy, preferred_for(default_device())
        choice = choose_for(default_device())
        dtype = choice.dtype or policy.compute_dtype
        return dataclasses.replace(policy, compute_dtype=dtype), choice


def with_compute_dtype(policy: Policy) -> Policy:
    """Returns the policy with a compute dtype: the device is asked where it has the default."""
    if not is_default(policy.compute_dtype):
        return policy
    return dataclasses.replace(policy, compute_dtype=preferred_for(default_device()).dtype)


def autocast_options(
    compute_dtype: Any = None,
    policy: Any = None,
    params: Any = arguments.AUTO,
    output_dtype: Any = "same",
    enabled: Any = True,
    on_unknown: Any = "keep",
    residuals: Any = "declared",
    keep_scopes: Any = (),
    compiler_options: Any = None,
) -> Options:
    """Checks and normalizes the options of `autocast`, once, when a function is wrapped.

    A wrong option fails there. Two wrappers with equal options are equal, so that
    ``jit(autocast(fn))`` made anew finds its trace.
    """
    # A traced value has the type of an array, but its user sees a bool: the message that asks for
    # a bool would not help.
    if isinstance(enabled, Tracer):
        raise TypeError(
            f"enabled must be known when the program is traced, got the traced value {enabled}. "
            "Make it a static argument, or choose between two functions with jax.lax.cond."
        )
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool, got {shown(enabled)}.")
    if on_unknown not in ("keep", "warn", "error"):
        raise ValueError(f"on_unknown must be 'keep', 'warn' or 'error', got {shown(on_unknown)}.")
    params = arguments.check_params(params)
    auto = isinstance(compute_dtype, str) and compute_dtype == "auto"
    policy = _policy(None if auto else compute_dtype, policy, enabled)
    output_dtype = check_output_dtype(output_dtype, policy)
    kept = as_choice(residuals, keep_scopes)
    onednn = asks_for_onednn(compiler_options)
    return Options(policy, params, output_dtype, enabled, on_unknown, kept, auto, onednn)


def tool_options(compute_dtype: Any, policy: Any, level: Level | None) -> Options | None:
    """Returns the options that the arguments of a tool describe, None where they say nothing.

    Args:
        compute_dtype: As for `autocast`.
        policy: As for `autocast`.
        level: As for `Policy`; None for the policy's.
    """
    if compute_dtype is None and policy is None and level is None:
        return None
    options = autocast_options(compute_dtype, policy)
    if level is None:
        return options
    policy = dataclasses.replace(options.policy, level=level)
    return dataclasses.replace(options, policy=policy)


def _policy(compute_dtype: Any, policy: Any, enabled: bool) -> Policy:
    policy = None if policy is None else as_policy(policy)
    # A script that turns autocast off often says so twice: by enabled=False and by float32.
    off = not enabled and find_dtype(compute_dtype) == FLOAT32
    if compute_dtype is None or off:
        return policy or Policy()
    dtype = as_compute_dtype(compute_dtype)
    if policy is None or is_default(policy.compute_dtype):
        return dataclasses.replace(policy or Policy(), compute_dtype=dtype)
    if dtype not in (policy.compute_dtype, DEFAULT):
        raise ValueError(
            f"compute_dtype={dtype} contradicts the policy's {policy.compute_dtype}; leave "
            "one of them out."
        )
    return policy
