"""Models of other libraries whose layers stand in a loop: the same values and gradients."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast import autocast, keep_less
from jmp_autocast.integrations import nnx as nnx_integration
from tests.support.jaxprs import find, trace
from tests.support.numerics import normal, relative_error

pytestmark = pytest.mark.usefixtures("jit_caches")

X = normal(1, x=(4, 8))["x"]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.Dense(16)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(h)), None


def linen(block):
    stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    model = stack()
    params = model.init(jax.random.key(0), X, None)
    return lambda params, x: jnp.mean(model.apply(params, x, None)[0] ** 2), params


def haiku():
    def net(x):
        def block(x):
            h = hk.LayerNorm(-1, True, True)(x)
            return x + hk.Linear(8)(jax.nn.silu(hk.Linear(16)(h)))

        return jnp.mean(hk.experimental.layer_stack(3)(block)(x) ** 2)

    model = hk.without_apply_rng(hk.transform(net))
    return model.apply, model.init(jax.random.key(0), X)


def equinox():
    def make(key):
        return eqx.nn.MLP(8, 8, 16, 1, activation=jax.nn.gelu, key=key)

    layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3))
    arrays, static = eqx.partition(layers, eqx.is_array)

    def loss(arrays, x):
        def step(x, layer):
            return x + jax.vmap(eqx.combine(layer, static))(x), None

        return jnp.mean(jax.lax.scan(step, x, arrays)[0] ** 2)

    return loss, arrays


MODELS = {
    "linen": lambda: linen(LinenBlock),
    "linen remat": lambda: linen(nn.remat(LinenBlock, prevent_cse=False)),
    "haiku": haiku,
    "equinox": equinox,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    loss, params = MODELS[name]()
    found, expected = (jax.jit(jax.grad(f))(params, X) for f in (keep_less(loss), loss))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-6
    # A user's own checkpoint says already what is kept.
    checkpoints = [
        len(find(trace(f, params, X), "remat2", "checkpoint")) for f in (keep_less(loss), loss)
    ]
    assert (checkpoints[0] == checkpoints[1]) is (name == "linen remat")


def test_a_flax_nnx_model():
    class Net(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def make(rngs):
                return nnx.Linear(8, 8, rngs=rngs)

            self.layers = make(rngs)
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1

            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def through(layer, x):
                return x + nnx.gelu(layer(x))

            return through(self.layers, x)

    def gradient(**options):
        net = Net(nnx.Rngs(0))
        loss = nnx_integration.autocast(
            lambda net, x: jnp.mean(net(x) ** 2), compute_dtype=jnp.bfloat16, **options
        )
        grads = nnx.jit(nnx.grad(loss))(net, X)
        assert net.calls[...] == 1
        return grads

    for a, b in zip(
        *(jax.tree.leaves(gradient(**o)) for o in ({"residuals": "auto"}, {})), strict=True
    ):
        assert a.dtype == np.float32
        assert relative_error(a, b) < 5e-3  # one rounding of bfloat16


def test_mixed_precision_keeps_its_dtypes():
    loss, params = linen(LinenBlock)
    plain, planned = (
        trace(jax.grad(autocast(loss, residuals=r)), params, X) for r in ("declared", "auto")
    )
    assert find(planned, "remat2", "checkpoint")
    dots = [
        sorted(tuple(v.aval.dtype.name for v in e.invars[:2]) for e in find(p, "dot_general"))
        for p in (plain, planned)
    ]
    assert dots[0] == dots[1]
