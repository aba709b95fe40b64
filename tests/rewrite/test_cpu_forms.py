"""What a bfloat16 product is lowered to on a CPU: the digits, the kernels, and no abort."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.fast_products import products_in, share_in_kernels
from jmp_autocast import BF16, autocast, cpu_kernels
from jmp_autocast.interpreters.primitives.cpu_convolutions import convolution
from jmp_autocast.interpreters.primitives.cpu_products import matmul
from tests.fuzz.products import random_convolution
from tests.support.exact_products import error, exact_einsum

# What float32 accumulation of 512 products of rounded operands, rounded once, is off by.
BOUND = 0.005


@pytest.mark.parametrize("seed", range(40))
def test_a_random_product(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers([0, 1, 0, 0], [3, 3, 3, 3])
    letters = iter("abcdefghij")
    batch, summed, rows, columns = ([next(letters) for _ in range(n)] for n in counts)
    sizes = {i: int(rng.choice([1, 2, 5, 9])) for i in "abcdefghij"}
    terms = [rng.permutation(batch + summed + free).tolist() for free in (rows, columns)]
    x, y = (rng.standard_normal([sizes[i] for i in t]).astype(jnp.bfloat16) for t in terms)
    numbers = tuple(
        tuple(tuple(t.index(i) for i in dims) for t in terms) for dims in (summed, batch)
    )
    params = {"dimension_numbers": numbers}
    # Two programs: of both in one, jaxlib 0.10.0 merges a transpose into a product and aborts. It
    # has no kernels for bfloat16, so that there nothing but this test makes such a product.
    found = [
        jax.jit(lambda x, y, e=e: matmul(x, y, params, jnp.float32, exchanged=e))(x, y)
        for e in (False, True)
    ]
    if all(sizes[i] == 1 for i in summed):
        assert found == [None, None]
        return
    left, right = map("".join, terms)
    free = [i for i in left + right if i not in batch + summed]
    expected, _ = exact_einsum(f"{left},{right}->{''.join(batch + free)}", x, y)
    for product in found:
        np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)


def test_random_convolutions_whose_patches_do_not_overlap():
    rng, products = np.random.default_rng(0), 0
    for _ in range(150):
        program = random_convolution(rng)
        x, w = (np.asarray(x).astype(jnp.bfloat16) for x in program.operands)
        (eqn,) = jax.make_jaxpr(program.fn)(x, w).jaxpr.eqns
        form = lambda x, w, eqn=eqn: convolution(x, w, eqn.params, jnp.float32)
        if jax.eval_shape(form, x, w) is not None:
            products += 1
            found = jax.jit(form)(x, w)
            np.testing.assert_allclose(found, program.exact[0], rtol=1e-5, atol=1e-4)
    assert products > 30


# --- kernels ---------------------------------------------------------------------------------


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(512, 128)
        x = embed(tokens)
        for _ in range(2):
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x += nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


def test_the_products_of_a_gpt_are_in_fast_kernels_or_nothing_is_lowered_for_them():
    model, tokens = GPT(), jnp.zeros((4, 64), jnp.int32)

    def loss(params, tokens):
        logits = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    step = jax.jit(jax.value_and_grad(autocast(loss, policy=BF16)))
    products = products_in(step.lower(params, tokens).compile().as_text())
    share = share_in_kernels(products)
    if cpu_kernels.cpu_kernels().wide:
        assert share > 0.95
    else:
        # A naked bfloat16 product is a loop that adds up in bfloat16.
        assert all(p.operands == ("float32", "float32") for p in products)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_product_that_the_program_transposes_adds_up_in_float32(devices):
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    a, b = (jnp.asarray(rng.standard_normal((512, 512)), jnp.float32) for _ in range(2))
    a = jax.device_put(a, split)
    found = jax.jit(autocast(lambda a, b: (a @ b).T, policy=BF16))(a, b)
    exact = (np.asarray(a.astype(jnp.bfloat16), np.float64) @ np.asarray(b.astype(jnp.bfloat16))).T
    assert error(found, exact) < BOUND


def test_a_program_exported_for_all_platforms_is_right_and_has_the_products_of_each():
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal((128, 128)), jnp.float32) for _ in range(2))
    loss = lambda w, x: jnp.sum((x @ w).T * x)
    step = jax.jit(jax.grad(autocast(loss, policy=BF16), (0, 1)))
    export = lambda *platforms: jax.export.export(step, platforms=platforms)(w, x)
    together = export("cpu", "cuda", "tpu")
    rounded = [np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (w, x)]
    products = lambda text: {
        re.sub(r"%\S+", "", line.partition("loc(")[0]).strip()
        for line in text.splitlines()
        if "stablehlo.dot_general" in line
    }
    for platform in ("cuda", "tpu"):
        alone = products(export(platform).mlir_module())
        assert alone
        assert alone <= products(together.mlir_module())
    (of_w, of_x), exact = together.call(w, x), rounded[1].T @ rounded[1].T
    assert error(of_w, exact) < BOUND
    assert error(of_x, rounded[1].T @ rounded[0].T + (rounded[1] @ rounded[0]).T) < BOUND


@pytest.mark.parametrize("features", [frozenset(), frozenset({"amx_bf16"})])
def test_what_is_lowered_without_and_with_kernels(features, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "cpu_features", lambda: features)
    monkeypatch.setattr(cpu_kernels, "_has_kernel", lambda dtype: True)
    cpu_kernels._kernels_with.cache_clear()
    try:
        gradient = jax.grad(autocast(lambda w, x: jnp.sum(jnp.sin(x @ w)), policy=BF16))
        text = jax.jit(gradient).lower(jnp.ones((32, 16)), jnp.ones((8, 32))).as_text()
    finally:
        cpu_kernels._kernels_with.cache_clear()
    dots = [line.rpartition(" : ")[2] for line in text.splitlines() if "dot_general" in line]
    assert len(dots) == 2
    # The gradient of the weight is widened, or it is a product of its own form.
    assert ("bf16" in dots[1].partition("->")[0]) == bool(features)
