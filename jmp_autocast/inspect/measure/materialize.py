"""Arrays that XLA computes once and writes out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...interpreters.compat import Tracer, device_varying, varying_axes
from .devices import is_whole_on_device
from .measured import is_measurable


def materialized(x: Any) -> Any:
    """Returns an array that XLA computes once, however many reductions read it.

    XLA would fuse the cheap equations that lead to it into each reduction, and compile them as
    often. An ``optimization_barrier`` prevents that on devices; the CPU backend drops barriers
    before it fuses, but it never fuses through a branch.

    Args:
        x: A result of an equation; what is not measured is returned as it is.
    """

    def other(x: Any) -> Any:
        # Like the array also in its sharding, which is a part of its type on an explicit mesh.
        return device_varying(jnp.zeros_like(x), varying_axes(x))

    def through_branch(x: Any) -> Any:
        # The barrier hides from the compiler that the condition is a constant.
        return lax.cond(lax.optimization_barrier(jnp.bool_(True)), lambda x: x, other, x)

    # An array that is no tracer has been computed.
    if not isinstance(x, Tracer) or not is_measurable(aval := jax.typeof(x)):
        return x
    if not is_whole_on_device(aval):
        return x
    return lax.platform_dependent(x, cpu=through_branch, default=lax.optimization_barrier)
