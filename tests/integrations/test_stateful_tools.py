"""The tools on a model with state: batch statistics, dropout, counters; forward and gradient."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jmp_autocast import (
    BF16,
    Float8,
    Policy,
    autocast,
    cast_params,
    check_numerics,
    compare,
    explain,
    op_stats,
    quantize_params,
    tune,
)
from jmp_autocast.integrations import nnx as integration
from tests.support.nnx_models import X, new_net


def nnx_loss(net, x):
    return jnp.mean(net(x) ** 4)


def test_programs_are_read():
    """`explain` and `op_stats`: of the function, its wrapper, and the gradients of both."""
    args, mixed = (new_net(), X), integration.autocast(nnx_loss, policy=BF16)
    for f in (nnx_loss, nnx.grad(nnx_loss)):
        assert explain(f, *args, policy="bfloat16").totals.low_share == 1
        assert {c.operands[0] for c in dots(f, args)} == {"float32"}
    assert explain(mixed, *args).totals.low_share == 1
    for f in (mixed, nnx.grad(mixed)):
        assert {c.operands[0] for c in dots(f, args)} == {"bfloat16"}


def dots(fn, args):
    return [c for c in op_stats(fn, *args) if c.primitive == "dot_general"]


@pytest.mark.slow
def test_values_and_gradients_are_measured():
    args, mixed = (new_net(), X), integration.autocast(nnx_loss, policy=BF16)
    gradients = check_numerics(nnx.grad(mixed))(*args)
    assert jax.tree.leaves(gradients)[0].dtype == jnp.float32
    comparison = compare(nnx_loss, *args, policy=BF16, argnums=0)
    # The parameters alone: batch statistics and counters have no gradient in a framework.
    kernel = next(path for path in comparison.gradients if "kernel" in path)
    assert kernel.startswith("0/")
    assert not [path for path in comparison.gradients if "mean" in path or "rngs" in path]
    assert 0 < comparison.gradients[kernel].error < 0.1
    policy = tune(
        nnx_loss,
        batches=[args],
        tolerance=0.5,
        argnums=0,
        policy=Policy(level="compute"),
        progress=False,
    )
    assert (policy.compute_dtype, policy.level) == (jnp.bfloat16, "compute")


def test_nnx_state_moves_once_per_checked_call():
    net = new_net()
    checked = check_numerics(integration.autocast(nnx_loss, policy=BF16))
    for calls in (1, 2):
        checked(net, X)
        assert net.dropout.rngs.count[...] == calls
    assert bool((net.norm.mean[...] != 0).any())
    explain(nnx_loss, net, X)
    compare(nnx_loss, net, X, policy=BF16)
    assert net.dropout.rngs.count[...] == 2  # what looks at a program changes no state


def test_a_fault_leaves_nnx_state_as_it_was():
    net = new_net()
    with pytest.raises(FloatingPointError, match="log"):
        check_numerics(lambda net, x: jnp.log(net(x) * 0))(net, X)
    assert net.dropout.rngs.count[...] == 0


def test_a_merge_inside_plain_autocast_says_copy():
    graphdef, state = nnx.split(new_net())
    with pytest.raises(TypeError, match=r"nnx\.merge\(graphdef, state, copy=True\)"):
        autocast(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)
    copied = autocast(lambda state, x: nnx.merge(graphdef, state, copy=True)(x), policy=BF16)
    assert jax.eval_shape(copied, state, X).shape == (8, 3)


# --- parameters that are stored small -------------------------------------------------------


class Summed(nnx.Module):
    """Sums what it reads in a cache of its own, or in one beside it."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = (nnx.Linear(32, 32, rngs=rngs) for _ in range(2))
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.cache = nnx.Cache(jnp.zeros((1, 32)))

    def __call__(self, x, cache=None):
        cache = self.cache if cache is None else cache
        cache[...] += self.first(x)
        return self.second(self.norm(cache[...]))


FP8 = Policy(jnp.bfloat16, matmul=Float8(minimum=16, skip=(), emulate=True))
TOOLS = {
    "cast": (cast_params, BF16, "bfloat16"),
    "quantize": (quantize_params, FP8, "float8_e4m3fn"),
}
CACHES = {"in it": lambda: (), "beside it": lambda: (nnx.Cache(jnp.zeros((1, 32))),)}


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("tool", TOOLS)
def test_parameters_are_stored_and_the_cache_stays(tool, cache, wrapped):
    store, policy, dtype = TOOLS[tool]
    net, x, cache = Summed(), jnp.ones((1, 32)), CACHES[cache]()
    fn = lambda net, *args: net(*args)
    low = integration.autocast(fn, policy=policy)
    options = {} if wrapped else {"policy": policy}
    small = store(low if wrapped else fn, net, x, *cache, check=True, **options)
    assert isinstance(small, Summed)
    assert small.cache is not net.cache
    kernels = (jax.tree.leaves(layer.kernel)[0] for layer in (small.first, small.second))
    assert [str(kernel.dtype) for kernel in kernels] == [dtype] * 2
    assert small.norm.scale[...].dtype == jnp.float32
    assert not any(leaf.any() for leaf in jax.tree.leaves((net.cache, cache)))
    nnx.jit(low)(small, x, *cache)
    assert all(leaf.any() for leaf in jax.tree.leaves(cache or small.cache))


# --- `stateless` ----------------------------------------------------------------------------


def test_a_pure_function_of_dicts_of_arrays():
    net = new_net()
    fn, params, state = integration.stateless(integration.autocast(nnx_loss, policy=BF16), net)
    assert {"dense/kernel", "norm/scale"} < set(params)
    assert {"cache", "calls", "norm/mean", "dropout/rngs/count"} < set(state)
    assert not any("head" in name and "tied" in name for name in params)  # one array, two names
    first, after = jax.jit(fn)(params, state, X)
    assert net.calls[...] == 0
    assert (after["calls"], after["dropout/rngs/count"]) == (1, 1)
    assert after.keys() == state.keys()
    second, _ = jax.jit(fn)(params, after, X)
    expected = [nnx.jit(integration.autocast(nnx_loss, policy=BF16))(net, X) for _ in range(2)]
    assert [first, second] == expected


def test_parameters_do_not_change_in_a_pure_function():
    def trained(net, x):
        net.dense.kernel[...] *= 2
        return net(x)

    fn, *arrays = integration.stateless(trained, new_net())
    with pytest.raises(TypeError, match="trained changes the parameter 'dense/kernel', and"):
        jax.jit(fn)(*arrays, X)
