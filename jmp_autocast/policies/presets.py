"""Ready-made policies."""

from __future__ import annotations

import jax.numpy as jnp

from .policy import Policy

FP16 = Policy(jnp.float16)
"""float16 compute. Gradients underflow: scale the loss."""

BF16 = Policy(jnp.bfloat16)
"""bfloat16 compute: float32's range with 8 bits of precision; needs no loss scaling."""

FP8 = Policy(jnp.bfloat16, matmul="float8")
"""bfloat16 compute, and the products of weights in float8: for GPUs and TPUs with 8-bit units."""
