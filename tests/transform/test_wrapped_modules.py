"""A wrapped module as part of another one: whoever takes parameters from a tree finds its own."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jmp_autocast import autocast, keep_less
from jmp_autocast.integrations import nnx as integration
from tests.support.jaxprs import find, trace

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)


class Net(eqx.Module):
    encoder: eqx.Module
    head: eqx.nn.Linear

    def __init__(self, wrap):
        keys = jax.random.split(jax.random.key(0))
        self.encoder = wrap(eqx.nn.MLP(8, 8, 16, 1, jnp.tanh, key=keys[0]))
        self.head = eqx.nn.Linear(8, 1, key=keys[1])

    def __call__(self, x):
        return self.head(self.encoder(x))


class NnxNet(nnx.Module):
    def __init__(self, wrap):
        rngs = nnx.Rngs(0)
        self.encoder = wrap(nnx.Linear(8, 8, rngs=rngs))
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.encoder(x))


def bf16(module):
    return autocast(module, jnp.bfloat16)


def loss(net, x):
    return jnp.mean((jax.vmap(net)(x) - 1) ** 2)


def arrays(net):
    return jax.tree.leaves(eqx.filter(net, eqx.is_inexact_array))


@pytest.mark.parametrize("wrap", [bf16, keep_less])
def test_a_wrapped_part_of_a_model_is_trained(wrap):
    """Its weights were no part of the tree: two of six arrays had gradients, and no error came."""
    net, plain = Net(wrap), Net(lambda module: module)
    found, expected = (eqx.filter_jit(eqx.filter_grad(loss))(n, X) for n in (net, plain))
    pairs = list(zip(arrays(found), arrays(expected), strict=True))
    assert len(pairs) == 6
    for gradient, reference in pairs:
        assert gradient.dtype == np.float32
        np.testing.assert_allclose(gradient, reference, atol=3e-2 * np.abs(reference).max())

    tx = optax.sgd(0.1)
    updates, _ = tx.update(found, tx.init(eqx.filter(net, eqx.is_inexact_array)))
    trained = eqx.apply_updates(net, updates)
    assert isinstance(trained.encoder, type(net.encoder))
    assert all(np.any(a != b) for a, b in zip(arrays(net), arrays(trained), strict=True))


def test_the_part_alone_is_in_mixed_precision():
    first, second, head = find(trace(jax.vmap(Net(bf16)), X), "dot_general")
    assert first.invars[0].aval.dtype == second.invars[0].aval.dtype == jnp.bfloat16
    assert head.invars[0].aval.dtype == np.float32


def test_the_paths_name_the_module():
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(Net(bf16))]
    assert ".encoder.__wrapped__.layers[0].weight" in paths
    zero = eqx.tree_at(lambda net: net.encoder.__wrapped__.layers[0].bias, Net(bf16), jnp.zeros(16))
    assert not zero.encoder.__wrapped__.layers[0].bias.any()


THROUGH = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "map": lambda layer: jax.tree.map(jnp.asarray, layer),
}


@pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)
def test_it_is_the_same_kind_of_wrapper_afterwards(through):
    layer = bf16(eqx.nn.Linear(8, 3, key=jax.random.key(0)))
    again = through(layer)
    assert type(again) is type(layer)
    assert repr(again) == repr(layer)
    assert again.policy == layer.policy
    np.testing.assert_array_equal(again(X[0]), layer(X[0]))


def test_the_wrapper_of_a_function_stays_a_leaf():
    assert jax.tree.leaves(bf16(jnp.tanh)) == [bf16(jnp.tanh)]


def test_nnx_asks_whether_a_wrapped_layer_is_data():
    with pytest.raises(ValueError, match=r"nnx\.data"):
        NnxNet(bf16)


@pytest.mark.parametrize("wrap", [lambda x: nnx.data(bf16(x)), integration.autocast])
def test_a_wrapped_layer_of_nnx_is_trained(wrap):
    net = NnxNet(wrap)
    gradients = nnx.grad(lambda net, x: jnp.mean(net(x) ** 2))(net, X)
    assert len(jax.tree.leaves(gradients)) == 4
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
    before = nnx.to_pure_dict(nnx.state(net))
    optimizer.update(net, gradients)
    after = nnx.to_pure_dict(nnx.state(net))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), before, after)))


def test_the_statistics_of_a_wrapped_layer_of_nnx_change():
    norm = integration.autocast(nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    net = nnx.Sequential(norm, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    nnx.jit(lambda net, x: net(x))(net, X)
    np.testing.assert_allclose(norm.__wrapped__.mean[...], 0.01 * X.mean(0), rtol=1e-5)
