"""A program of the shape of MaxText's: one place for what each of its parts is tested for alone.

NNX modules are merged in the body of a scan, in a checkpoint that keeps what is named; the
attention is a kernel with a rule, made in the layer, in `vmap` and in `shard_map`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

from jmp_autocast import Policy, in_compute_dtype
from jmp_autocast.integrations.nnx import autocast
from tests.support.jaxprs import assert_dots_run_in, dtypes, find, trace
from tests.support.numerics import assert_trees_near

# A rule that closes over a tracer keeps it: JAX's own trace of it leaks.
pytestmark = pytest.mark.usefixtures("jit_caches")

WIDTH, LAYERS, ROWS = 16, 2, 8
MESH = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
SPLIT = P("fsdp")


def attention_kernel(q, k, mask, o):
    scores = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)
    o[...] = jnp.dot((scores * mask[...]).astype(k.dtype), k[...]).astype(o.dtype)


def product(q, k, mask):
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return pl.pallas_call(attention_kernel, out_shape=shape, interpret=True)(q, k, mask)


def kernel_for(mask):
    """As splash attention: a function with a rule, which closes over what the layer knows."""

    @jax.custom_vjp
    def toy_splash_attention(q, k):
        return product(q, k, mask)

    def backward(saved, g):
        q, k = saved
        return product(g, k, mask), product(q, g, mask)

    toy_splash_attention.defvjp(lambda q, k: (product(q, k, mask), (q, k)), backward)
    return in_compute_dtype(toy_splash_attention)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.qk = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        q, k = jnp.split(self.qk(x), 2, axis=-1)
        kernel = jax.vmap(kernel_for(np.tril(np.full((ROWS, ROWS), 0.02, np.float32))))
        specs = {"in_specs": (SPLIT, SPLIT), "out_specs": SPLIT, "check_vma": False}
        context = jax.shard_map(kernel, mesh=MESH, **specs)(q, k)
        return x + self.out(checkpoint_name(context, "context"))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(rngs)
        self.head = nnx.Linear(WIDTH, 32, use_bias=False, rngs=rngs)

    def __call__(self, x):
        graph, stack = nnx.split(self.layers)
        keep = jax.checkpoint_policies.save_only_these_names("context")

        @functools.partial(jax.checkpoint, policy=keep)
        def layer(x, state):
            return nnx.merge(graph, state)(x), None

        return self.head(jax.lax.scan(layer, x, stack)[0])


def loss_fn(model, x):
    return jnp.mean(jax.nn.log_softmax(model(x)) ** 2)


def test_by_hand_as_a_policy():
    """All kernels and products in 16 bits, gradients of weights too, and values near float32."""
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (4, ROWS, WIDTH))

    def gradient(cast):
        return jax.grad(lambda params, x: cast(loss_fn)(nnx.merge(graph, params), x))

    low = gradient(lambda fn: autocast(fn, policy=Policy("bfloat16", level="by_hand")))
    jaxpr = trace(low, params, x)
    calls = [dtypes([*e.invars[:2], *e.outvars]) for e in find(jaxpr, "pallas_call")]
    plain = trace(gradient(lambda fn: fn), params, x)
    assert len(calls) == len(find(plain, "pallas_call"))  # no kernel runs more often
    assert set(calls) == {("bfloat16",) * 3}
    assert_dots_run_in("bfloat16", jaxpr)
    found, exact = jax.jit(lambda *a: (low(*a), gradient(lambda f: f)(*a)))(params, x)
    assert_trees_near(found, exact, 5e-2)
