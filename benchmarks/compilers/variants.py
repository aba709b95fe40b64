"""The ways to mixed precision that are compared: one function for each row of the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jmp
from comparison.cases import Case, Loss, Tree, cross_entropy, forward, plain_loss

from jmp_autocast import Policy, autocast

HAND = "hand-written"


def float32(model: Any, low_model: Any, dtype: Any) -> Loss:
    """No mixed precision; a TPU multiplies float32 matrices in bfloat16 all the same."""
    return plain_loss(model)


def handwritten(model: Any, low_model: Any, dtype: Any) -> Loss:
    """``dtype=`` given to every layer, the loss in float32."""

    def loss(params: Tree, batch: Tree) -> tuple[Any, Tree]:
        logits, state = forward(low_model, params, batch)
        return cross_entropy(logits.astype(jnp.float32), batch["labels"]), state

    return loss


def jmp_border(model: Any, low_model: Any, dtype: Any) -> Loss:
    """Parameters and inputs cast where the model begins, logits where it ends."""
    policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=dtype, output_dtype=jnp.float32)

    def loss(params: Tree, batch: Tree) -> tuple[Any, Tree]:
        params, inputs = policy.cast_to_compute((params, batch["inputs"]))
        logits, state = forward(model, params, {**batch, "inputs": inputs})
        return cross_entropy(policy.cast_to_output(logits), batch["labels"]), state

    return loss


def ours(**options: Any) -> Callable[[Any, Any, Any], Loss]:
    """Returns the variant that autocasts the plain model under a policy with these options."""

    def make(model: Any, low_model: Any, dtype: Any) -> Loss:
        return autocast(plain_loss(model), policy=Policy(dtype, **options))

    return make


VARIANTS: dict[str, Callable[[Any, Any, Any], Loss]] = {
    "float32": float32,
    HAND: handwritten,
    "jmp": jmp_border,
    "ours tensor_cores": ours(level="tensor_cores"),
    "ours o1": ours(),
    "ours compute": ours(level="compute"),
}
"""The rows, in order; each is made of the plain model, the one with ``dtype=``, and the dtype."""


def loss_of(variant: str, case: Case, dtype: Any) -> Loss:
    """Returns the loss of a case in a variant."""
    return VARIANTS[variant](case.build(), case.build(dtype), dtype)
