"""`cpu_barrier`: an ``optimization_barrier`` of one array on CPUs, nothing anywhere else."""

from __future__ import annotations

from typing import Any

from jax import lax

from ..compat.registration import (
    acts_on_each_element,
    define_primitive,
    lowers_to_function,
    lowers_to_operand,
    runs_elsewhere_as,
)

# XLA:CPU computes 16-bit arithmetic in float32. Where the cotangent of a bias is summed, it would
# keep all of that cotangent in float32 beside the 16-bit array that the contractions read: a ViT
# needed 41.84 MB of temporaries, and 41.71 MB with the barrier, which is what the hand-written
# model needs (JAX 0.12). Accelerators shall fuse the sum with what makes the cotangent instead.
cpu_barrier_p: Any = define_primitive("cpu_barrier", value=lambda x: x, aval=lambda x: x)
acts_on_each_element(cpu_barrier_p)
lowers_to_operand(cpu_barrier_p, 0)
runs_elsewhere_as(cpu_barrier_p, lambda x: x)
lowers_to_function(cpu_barrier_p, lax.optimization_barrier, platform="cpu")


def cpu_barrier(x: Any) -> Any:
    """Returns ``x``, which XLA:CPU then writes out in its own dtype before it is read."""
    return cpu_barrier_p.bind(x)
