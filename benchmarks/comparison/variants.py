"""The ways to get mixed precision that are compared: one function per row of the tables."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp

from jmp_autocast import CastPolicy, Policy, autocast, keep_less
from jmp_autocast.policies import DATA_MOVEMENT, DEFAULT_RULES

from .cases import Case, Loss, Tree, cross_entropy, forward, plain_loss


def float32(case: Case, dtype: Any) -> Loss:
    """No mixed precision."""
    return plain_loss(case.build())


def handwritten(case: Case, dtype: Any) -> Loss:
    """``dtype=`` given to every layer, the loss in float32."""
    model = case.build(dtype)

    def loss(params: Tree, batch: Tree) -> tuple[Any, Tree]:
        logits, state = forward(model, params, batch)
        return cross_entropy(logits.astype(jnp.float32), batch["labels"]), state

    return loss


def jmp_border(case: Case, dtype: Any) -> Loss:
    """Parameters and inputs cast where the model begins, logits where it ends."""
    import jmp

    policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=dtype, output_dtype=jnp.float32)
    model = case.build()

    def loss(params: Tree, batch: Tree) -> tuple[Any, Tree]:
        params, inputs = policy.cast_to_compute((params, batch["inputs"]))
        logits, state = forward(model, params, {**batch, "inputs": inputs})
        return cross_entropy(policy.cast_to_output(logits), batch["labels"]), state

    return loss


def naive_promote(case: Case, dtype: Any) -> Loss:
    """Only dots and convolutions are low, and everything else promotes.

    An approximation: a rule per primitive cannot let parameters vote, so arithmetic is set to
    float32. That is what a promotion with float32 biases and scales comes to, save for operations
    that touch none between two dots.
    """
    rules = {
        name: CastPolicy.FP32
        for name, rule in DEFAULT_RULES.items()
        if rule is CastPolicy.PROMOTE and name not in DATA_MOVEMENT
    }
    rules |= dict.fromkeys(("div", "integer_pow"), CastPolicy.FP32)
    return autocast(plain_loss(case.build()), policy=Policy(dtype).with_rules(rules))


def ours(make_policy: Callable[[Any], Policy]) -> Callable[[Case, Any], Loss]:
    """Returns the variant that autocasts the plain model under a policy for a compute dtype.

    Args:
        make_policy: From a compute dtype to the policy.
    """

    def make(case: Case, dtype: Any) -> Loss:
        return autocast(plain_loss(case.build()), policy=make_policy(dtype))

    return make


def keeping(
    make: Callable[[Case, Any], Loss], residuals: Literal["auto", "recompute"]
) -> Callable[[Case, Any], Loss]:
    """Returns the variant that plans what another one keeps for its backward pass."""
    return lambda case, dtype: keep_less(make(case, dtype), residuals=residuals)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row.

    Args:
        name: Its name in the tables and in ``--variants``.
        make: From a case and a compute dtype to a loss; a new function object at each call.
        low: It computes in 16 bits.
        by_default: It is measured where no variants are named.
    """

    name: str
    make: Callable[[Case, Any], Loss]
    low: bool = True
    by_default: bool = True


BASE = "hand-written"

_ALL = (
    Variant("float32", float32, low=False),
    Variant(BASE, handwritten),
    Variant("jmp border", jmp_border),
    Variant("naive promote", naive_promote),
    Variant("ours tensor_cores", ours(lambda dtype: Policy(dtype, level="tensor_cores"))),
    Variant("ours o1", ours(Policy)),
    Variant("ours compute", ours(lambda dtype: Policy(dtype, level="compute"))),
    Variant("ours by_hand", ours(lambda dtype: Policy(dtype, level="by_hand"))),
)
# Loops alone matter to compilers; the models of `vs_handwritten.py` are unrolled, and what jaxprs
# keep is counted there.
_KEEPING = tuple(
    Variant(f"{v.name} + {residuals}", keeping(v.make, residuals), by_default=False)
    for v in _ALL
    if v.name in (BASE, "ours o1", "ours compute")
    for residuals in ("auto", "recompute")
)

# A machine with a GPU may have no jmp.
_HAS_JMP = importlib.util.find_spec("jmp") is not None
VARIANTS = tuple(v for v in (*_ALL, *_KEEPING) if _HAS_JMP or v.make is not jmp_border)
"""The rows, in order. Ours are those whose names begin so."""
