"""What a rewrite of single equations gets wrong where PyTorch's fused operations are right.

The op lists see ``layer_norm``, ``softmax`` and ``linear``; a jaxpr holds their parts.
"""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from jmp_autocast import autocast
from tests.support.jaxprs import casts, find, through_a_dot, trace
from tests.support.torch_ops import DTYPES, computed, normal, run_all

LOWEST = np.finfo(np.float32).min


# --- the bias leak ----------------------------------------------------------------------------


def dense(p, x):
    return x @ p["w"] + p["b"]


def expanded(p, x):
    return x @ p["w"] + jnp.broadcast_to(p["b"].reshape(1, -1), x.shape)


def scaled(p, x):
    return (x @ p["w"]) * p["b"] - p["b"][None] / 2


def convolution(p, x):
    kernel = p["w"].reshape(1, *p["w"].shape)
    out = lax.conv_general_dilated(
        x[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return (out + p["b"])[0]


def prelu(p, x):
    x = x @ p["w"]
    return jnp.where(x >= 0, x, p["b"] * x)


def mlp(p, x):
    return dense(p, nn.gelu(dense(p, jnp.tanh(dense(p, x)))))


LAYERS = [dense, expanded, scaled, convolution, prelu, mlp]


@pytest.mark.parametrize("fn", LAYERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_does_not_leak_float32(fn, dtype):
    """A float32 bias added to a low product leaves it low; a naive promotion makes every layer
    of a network float32."""
    p, x = {"w": normal(4, 4), "b": normal(4, seed=1)}, normal(3, 4, seed=2)
    jaxpr = trace(computed(fn, dtype), p, x)
    assert [v.aval.dtype.name for v in jaxpr.jaxpr.outvars] == [dtype]
    assert not casts(jaxpr, dtype, "float32")
    (got,) = run_all([computed(fn, dtype)], [(p, x)])
    np.testing.assert_allclose(got.astype(np.float32), fn(p, x), atol=12 * jnp.finfo(dtype).eps)


# --- reductions of large activations ----------------------------------------------------------


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean(jnp.square(x - mean), -1, keepdims=True) + 1e-5)


def fast_layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) - mean * mean + 1e-5)


def rms_norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def standardize(x):
    return nn.standardize(x, axis=-1, epsilon=1e-5)


def flax_layer_norm(x):
    return linen.LayerNorm(use_bias=False, use_scale=False).apply({}, x)


def batch_norm(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


NORMS = [layer_norm, fast_layer_norm, rms_norm, standardize, flax_layer_norm, batch_norm]


@pytest.mark.parametrize("mean", [0.0, 100.0, 300.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_large_activations(dtype, mean):
    """Exactly the float32 norm of the 16-bit input. Squared in 16 bits, activations of mean 100
    give errors of 2.4 in bfloat16, and of mean 300 infinity in float16."""
    x = (np.random.default_rng(0).normal(size=(4, 64), scale=2.0) + mean).astype(np.float32)
    low = x.astype(jnp.dtype(dtype)).astype(np.float32)
    after = [computed(lambda x, f=f: f(through_a_dot(x)), dtype) for f in NORMS]
    ours = run_all(after, [(x,)] * len(NORMS))
    want = run_all(NORMS, [(low,)] * len(NORMS))
    for norm, got, true in zip(NORMS, ours, want, strict=True):
        assert got.dtype == np.float32, norm.__name__
        # Two float32 programs: compiled together, sums may be taken in another order.
        tolerance = 1e-5 * max(1.0, mean * mean * (norm in (fast_layer_norm, flax_layer_norm)))
        np.testing.assert_allclose(got, true, atol=tolerance, err_msg=norm.__name__)


@pytest.mark.parametrize("std", [3.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_low_logits(dtype, std):
    """The float32 softmax of the same logits; subtracted in 16 bits they cost 6 % to 30 %."""
    fns = {
        "softmax": nn.softmax,
        "log_softmax": nn.log_softmax,
        "logsumexp": lambda x: nn.logsumexp(x, -1),
        "scaled": lambda x: nn.softmax(x / 3.0),
        "masked": lambda x: nn.softmax(jnp.where(x > -1.0, x, LOWEST)),
        "biased": lambda x: nn.softmax(x + jnp.arange(100, dtype=jnp.float32) / 50),
    }
    x = np.random.default_rng(0).normal(size=(8, 100), scale=std).astype(np.float32)
    low = x.astype(jnp.dtype(dtype)).astype(np.float32)
    after = [computed(lambda x, f=f: f(through_a_dot(x)), dtype) for f in fns.values()]
    ours = run_all(after, [(x,)] * len(fns))
    want = run_all(list(fns.values()), [(low,)] * len(fns))
    for name, got, true in zip(fns, ours, want, strict=True):
        assert got.dtype == np.float32, name
        np.testing.assert_allclose(got, true, rtol=2e-5, atol=1e-12, err_msg=name)


# --- equations whose parameters hold dtypes ---------------------------------------------------


def test_a_scatter_add_accumulates_in_float32():
    """4096 additions of 2**-9 to a low row: in bfloat16 the sum would stop at 2."""
    x = jnp.full((4096, 1), 2.0**-9)
    add = lambda x: through_a_dot(x[:2]).at[np.zeros(4096, int)].add(through_a_dot(x))
    jaxpr = trace(computed(add), x)
    assert find(jaxpr, "scatter-add")[0].outvars[0].aval.dtype == jnp.float32
    np.testing.assert_allclose(jax.jit(autocast(add))(x)[0], 8 + 2.0**-9)
    assert jax.jit(computed(add))(x)[0] == jnp.bfloat16(8)  # rounded once, when it is returned
