"""Dot algorithms: the compiler gets the request as JAX emits it, in both directions."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast, full_precision
from tests.support.exact_products import error, exact_einsum

PRESETS = lax.DotAlgorithmPreset
X3 = PRESETS.BF16_BF16_F32_X3


def operands():
    rng = np.random.default_rng(0)
    shapes = (32, 512), (512, 48)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def by_policy(a, b):
    policy = BF16.with_rules({"*": "float32"}).with_rules({"*": "bf16_bf16_f32_x3"})
    return autocast(lambda a, b: a @ b, policy=policy)(a, b)


def by_program(a, b):
    return autocast(functools.partial(jnp.matmul, precision=X3), policy=BF16)(a, b)


def in_a_scope(a, b):
    def fn(a, b):
        with full_precision():
            return jnp.dot(a, b, precision=X3)

    return autocast(fn, policy=BF16)(a, b)


@pytest.mark.parametrize("fn", [by_policy, by_program, in_a_scope])
def test_a_product_in_an_algorithm_is_not_rounded_to_16_bits(fn):
    a, b = operands()
    found, pullback = jax.vjp(jax.jit(fn), a, b)
    exact, gradients = exact_einsum("ab,bc->ac", a, b)
    assert error(found, exact) < 8e-6
    g = jnp.asarray(np.random.default_rng(1).standard_normal(exact.shape), jnp.float32)
    for got, right in zip(pullback(g), gradients(np.asarray(g)), strict=True):
        assert error(got, right) < 8e-6


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("precision", [X3, PRESETS.TF32_TF32_F32, PRESETS.F32_F32_F32])
def test_each_platform_gets_what_jax_emits(precision, platform):
    if platform == "cpu" and precision is PRESETS.TF32_TF32_F32:
        precision = PRESETS.BF16_BF16_F32  # JAX refuses the other on CPUs
    a, b = operands()

    def text(fn):
        both = jax.value_and_grad(lambda a, b: jnp.sum(fn(a, b)), (0, 1))
        lowered = jax.jit(both).trace(a, b).lower(lowering_platforms=(platform,))
        return re.sub(r"@jit_\S+|loc\(.*\)", "", lowered.as_text())

    plain = functools.partial(jnp.matmul, precision=precision)
    ours = text(autocast(plain, policy=BF16.with_rules({"*": "float32"})))
    assert "algorithm" in ours
    assert ours == text(plain)
