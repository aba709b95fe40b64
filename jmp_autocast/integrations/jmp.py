"""Converts policies to `jmp`; `autocast` itself takes policies of `jmp`."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax.numpy as jnp
import jmp

from ..call.options import autocast_options
from ..policies import FLOAT32, Policy, as_policy


def to_jmp(policy: Any) -> jmp.Policy:
    """Returns the ``jmp.Policy`` with the dtypes of a policy, for code that casts by hand.

    A ``jmp.Policy`` is three dtypes: parameters, which are float32, compute dtype and output dtype,
    which is float32 if the policy has none. It has nothing for single operations: levels, rules and
    scopes are lost, with a warning that names them.

    Args:
        policy: A `Policy`, a dtype or a string, as for `jmp_autocast.autocast`.

    Returns:
        The ``jmp.Policy``.

    Raises:
        TypeError: ``policy`` is no policy.
        ValueError: The string cannot be read.

    Warns:
        UserWarning: The policy has options that a ``jmp.Policy`` lacks.

    Example:
        >>> from jmp_autocast import BF16
        >>> from jmp_autocast.integrations.jmp import to_jmp
        >>> to_jmp(BF16).compute_dtype.name
        'bfloat16'
    """
    policy, _ = autocast_options(as_policy(policy)).chosen
    default = Policy(policy.compute_dtype)
    names = {field.name for field in dataclasses.fields(policy)} - {"compute_dtype", "output_dtype"}
    # A warning, no error: code that casts by hand runs without them, at another precision.
    if lost := sorted(n for n in names if getattr(policy, n) != getattr(default, n)):
        warnings.warn(
            f"A jmp.Policy has three dtypes and nothing else: {', '.join(lost)} of the policy "
            "cannot be kept. jmp_autocast.autocast(fn, policy=policy) keeps all of it.",
            stacklevel=2,
        )
    return jmp.Policy(
        param_dtype=FLOAT32,
        compute_dtype=jnp.dtype(policy.compute_dtype),
        output_dtype=jnp.dtype(policy.output_dtype or FLOAT32),
    )
