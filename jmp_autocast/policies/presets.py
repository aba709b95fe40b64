"""Ready-made policies."""

from __future__ import annotations

import jax.numpy as jnp

from .policy import Policy

FP16 = Policy(jnp.float16)
"""float16 compute. Gradients underflow: scale the loss."""

BF16 = Policy(jnp.bfloat16)
"""bfloat16 compute: float32's range with 8 bits of precision; needs no loss scaling."""
