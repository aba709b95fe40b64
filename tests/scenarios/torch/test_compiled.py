"""PyTorch's tests of autocast under its compiler, export and vmap, restated for JAX.

From ``test/test_jit_autocast.py``, ``test/dynamo/test_ctx_manager.py`` and the functorch tests;
each test names those that it restates.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn
from jax.experimental import io_callback

from jmp_autocast import autocast, compute_precision, full_precision
from tests.support.jaxprs import dot_dtypes, find, trace
from tests.support.torch_ops import DTYPES, computed, normal, out_dtypes

BF16, F16, F32 = (("bfloat16",) * 3, ("float16",) * 3, ("float32",) * 3)
A, B = (normal(3, 3, seed=k) for k in range(2))


def test_autodiff_over_calls():
    """test_autocast_autodiff (53): five calls, jitted and not; float32 gradients."""
    loss = autocast(lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) ** 2), compute_dtype="bfloat16")
    p, step = {"w": A}, jax.jit(jax.value_and_grad(loss))
    value, grads = jax.value_and_grad(loss)(p, B)
    assert grads["w"].dtype == value.dtype == jnp.float32
    for _ in range(5):
        value_again, grads_again = step(p, B)
        np.testing.assert_allclose(value_again, value, rtol=2**-8)
        np.testing.assert_allclose(grads_again["w"], grads["w"], atol=2**-6)


@pytest.mark.parametrize(("layout", "bias"), [("NCHW", True), ("NHWC", False)])
def test_exported_network(layout, bias):
    """TestJitTraceAutocast, test_predispatch_autocast (58, 59): serialised and loaded again."""

    def network(p, x):
        x = lax.conv_general_dilated(x, p["kernel"], (2, 2), "VALID", dimension_numbers=dims)
        channel = (1, -1, 1, 1) if layout == "NCHW" else (1, 1, 1, -1)
        x = x + p["bias"].reshape(channel) if bias else x
        mean, var = (f(x, axis=(0, *axes), keepdims=True) for f in (jnp.mean, jnp.var))
        x = nn.relu((x - mean) * lax.rsqrt(var + 1e-5))
        return nn.log_softmax(x.reshape(x.shape[0], -1) @ p["dense"])

    axes = (2, 3) if layout == "NCHW" else (1, 2)
    dims = (layout, "HWIO", layout)
    x = normal(2, *((1, 8, 8) if layout == "NCHW" else (8, 8, 1)))
    p = {"kernel": normal(3, 3, 1, 4), "bias": normal(4, seed=1), "dense": normal(36, 5, seed=2)}
    fn = jax.jit(autocast(network, compute_dtype="bfloat16"))
    jaxpr = trace(fn, p, x)
    assert dot_dtypes(jaxpr) == [BF16] * 2
    assert all(eqn.invars[0].aval.dtype == jnp.float32 for eqn in find(jaxpr, "reduce_sum"))
    loaded = jax.export.deserialize(jax.export.export(fn)(p, x).serialize())
    np.testing.assert_allclose(loaded.call(p, x), fn(p, x), rtol=1e-3, atol=1e-3)


def test_attention_in_nested_regions():
    """test_autocast_sdpa (62): the inner region decides."""
    q = normal(1, 4, 2, 4)

    def fn(q):
        with compute_precision("float16"):
            x = nn.dot_product_attention(q, q, q)
        return nn.dot_product_attention(x, x, x)

    assert dot_dtypes(trace(autocast(fn, compute_dtype="bfloat16"), q)) == [F16, F16, BF16, BF16]


@pytest.mark.parametrize("callback", ["pure", "io"])
def test_callbacks(callback):
    """test_autocast_graph_break, graph_break_method, graph_break_inlining_autocast (63)."""
    seen = []

    def host(x):
        seen.append(x.dtype.name)
        return np.asarray(x) + 1

    def fn(a, b):
        shape = jax.ShapeDtypeStruct((3, 3), jnp.float32)
        call = jax.pure_callback if callback == "pure" else io_callback
        c = call(host, shape, a @ b)
        return (c + a @ b) @ b

    assert dot_dtypes(trace(computed(fn), A, B)) == [BF16] * 3
    out = jax.jit(computed(fn))(A, B)
    assert seen == ["float32"]
    np.testing.assert_allclose(out.astype(jnp.float32), (2 * A @ B + 1) @ B, atol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_compiled_regions(dtype):
    """backward_pass_autocast, #153044, #179804 (66): differentiating and compiling commute, also
    around a float32 region with a loss scale, whose own cotangents are too large for float16."""

    def loss(p, x):
        x = x @ p["w"]
        with full_precision():
            return jnp.sum(jnp.tanh(x @ p["w"]) ** 2 / 64.0) * (16384.0 * 64.0)

    ac = autocast(loss, compute_dtype=dtype)
    p = {"w": A}
    orders = [jax.grad(ac), jax.jit(jax.grad(ac)), jax.grad(jax.jit(ac))]
    first, *rest = [dot_dtypes(trace(f, p, B)) for f in orders]
    assert set(first) == {(dtype,) * 3, F32}
    assert all(dtypes == first for dtypes in rest)
    grads, *others = [jax.jit(f)(p, B)["w"] for f in orders]
    for other in others:
        np.testing.assert_array_equal(other, grads)
    want = jax.grad(loss)(p, B)["w"]
    np.testing.assert_allclose(grads, want, atol=0.02 * float(jnp.abs(want).max()))


def linear(p, x):
    return x @ p["w"] + p["b"]


def norm(p, x):
    x = linear(p, x)
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * p["b"]


@pytest.mark.parametrize("layer", [linear, norm], ids=lambda f: f.__name__)
def test_batching(layer):
    """functorch #327, #192617, #184890, #187265 (68): a batch does not change the dtype."""
    p, x = {"w": A, "b": A[0]}, normal(5, 3)
    fn = computed(layer)
    assert out_dtypes(jax.vmap(fn, (None, 0)), p, x) == out_dtypes(fn, p, x[0])
    assert out_dtypes(computed(jax.vmap(layer, (None, 0))), p, x) == out_dtypes(fn, p, x)
    assert out_dtypes(fn, p, x) == (["bfloat16"] if layer is linear else ["float32"])
    loss = autocast(lambda p, x: jnp.sum(jnp.sin(layer(p, x))), compute_dtype="bfloat16")
    per_example = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(p, x)
    together = jax.jit(jax.grad(loss))(p, x)
    for each, whole in zip(per_example.values(), together.values(), strict=True):
        assert each.dtype == jnp.float32
        np.testing.assert_allclose(each.sum(0), whole, atol=0.05)
    jacobian = jax.jit(jax.jacrev(autocast(layer, compute_dtype="bfloat16")))(p, x[0])
    true = jax.jit(jax.jacrev(layer))(p, x[0])
    for ours, want in zip(jacobian.values(), true.values(), strict=True):
        np.testing.assert_allclose(ours, want, atol=0.05)
