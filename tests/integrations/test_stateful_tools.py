"""The tools on models with state: batch statistics, dropout, counters; forward and gradient."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast import BF16, autocast, check_numerics, compare, explain, op_stats, tune
from jmp_autocast.integrations import nnx as integration

X = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
KEY = jax.random.key(2)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def nnx_loss(net, x):
    return jnp.mean(net(x) ** 4)


def nnx_case():
    return nnx_loss, (Net(nnx.Rngs(0)), X), integration.autocast, nnx.grad


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=False)(x)


def linen_loss(params, stats, x, key):
    options = {"mutable": ["batch_stats"], "rngs": {"dropout": key}}
    out, changed = LinenNet().apply({"params": params, **stats}, x, **options)
    return jnp.mean(out**4), changed


def linen_case():
    keys = {"params": KEY, "dropout": KEY}
    variables = jax.jit(LinenNet().init)(keys, X)
    stats = {"batch_stats": variables["batch_stats"]}
    grad = lambda f: jax.grad(f, has_aux=True)
    return linen_loss, (variables["params"], stats, X, KEY), autocast, grad


class EquinoxNet(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.dense = eqx.nn.Linear(4, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, key):
        x, state = self.norm(self.dense(x), state)
        return self.dropout(x, key=key), state


def equinox_loss(net, state, x, key):
    over = {"axis_name": "batch", "in_axes": (0, None, 0), "out_axes": (0, None)}
    out, state = jax.vmap(net, **over)(x, state, jax.random.split(key, len(x)))
    return jnp.mean(out**4), state


def equinox_case():
    net, state = eqx.nn.make_with_state(EquinoxNet)(KEY)
    grad = lambda f: eqx.filter_grad(f, has_aux=True)
    return equinox_loss, (net, state, X, KEY), autocast, grad


CASES = {"nnx": nnx_case, "linen": linen_case, "equinox": equinox_case}


@pytest.mark.parametrize("name", CASES)
def test_programs_are_read(name):
    """`explain` and `op_stats`: of the function, its wrapper, and the gradients of both."""
    fn, args, cast, grad = CASES[name]()
    mixed = cast(fn, policy=BF16)
    for f in (fn, grad(fn)):
        assert explain(f, *args, compute_dtype="bfloat16").totals.low_share == 1
        assert {c.operands[0] for c in dots(f, args)} == {"float32"}
    assert explain(mixed, *args).totals.low_share == 1
    for f in (mixed, grad(mixed)):
        assert {c.operands[0] for c in dots(f, args)} == {"bfloat16"}


def dots(fn, args):
    return [c for c in op_stats(fn, *args) if c.primitive == "dot_general"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_measured(name):
    fn, args, cast, grad = CASES[name]()
    gradients = check_numerics(grad(cast(fn, policy=BF16)))(*args)
    assert jax.tree.leaves(gradients)[0].dtype == jnp.float32
    comparison = compare(fn, *args, policy=BF16, argnums=0)
    # The parameters alone: batch statistics and counters have no gradient in a framework.
    kernel = next(path for path in comparison.gradients if "kernel" in path or "weight" in path)
    assert kernel.startswith("0/")
    assert not [path for path in comparison.gradients if "mean" in path or "rngs" in path]
    assert 0 < comparison.gradients[kernel].error < 0.1
    if name != "nnx":  # the others are pytrees, which `tune` has tests of its own for
        return
    policy = tune(fn, [args], tolerance=0.5, argnums=0, level="compute", progress=False)
    assert (policy.compute_dtype, policy.level) == (jnp.float16, "compute")


def test_nnx_state_moves_once_per_checked_call():
    net = Net(nnx.Rngs(0))
    checked = check_numerics(integration.autocast(nnx_loss, policy=BF16))
    for calls in (1, 2):
        checked(net, X)
        assert net.dropout.rngs.count[...] == calls
    assert bool((net.norm.mean[...] != 0).any())
    explain(nnx_loss, net, X)
    compare(nnx_loss, net, X, policy=BF16)
    assert net.dropout.rngs.count[...] == 2  # what looks at a program changes no state


def test_a_fault_leaves_nnx_state_as_it_was():
    net = Net(nnx.Rngs(0))
    with pytest.raises(FloatingPointError, match="log"):
        check_numerics(lambda net, x: jnp.log(net(x) * 0))(net, X)
    assert net.dropout.rngs.count[...] == 0


def test_a_merge_inside_plain_autocast_says_copy():
    graphdef, state = nnx.split(Net(nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"nnx\.merge\(graphdef, state, copy=True\)"):
        autocast(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)
    copied = autocast(lambda state, x: nnx.merge(graphdef, state, copy=True)(x), policy=BF16)
    assert jax.eval_shape(copied, state, X).shape == (6, 4)
