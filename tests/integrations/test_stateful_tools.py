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
    quantize_params,
    tune,
)
from jmp_autocast.integrations import nnx as integration
from tests.support.nnx_models import X, new_net


def nnx_loss(net, x):
    return jnp.mean(net(x) ** 4)


def test_programs_are_read():
    """`explain`: of the function, its wrapper, and the gradients of both."""
    args, mixed = (new_net(), X), integration.autocast(nnx_loss, policy=BF16)
    for f in (nnx_loss, nnx.grad(nnx_loss)):
        assert explain(f, *args, policy="bfloat16").totals.low_share == 1
    for f in (mixed, nnx.grad(mixed)):
        assert explain(f, *args).totals.low_share == 1


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
    start = Policy(level="compute")
    policy = tune(nnx_loss, *args, tolerance=0.5, argnums=0, policy=start).policy
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
    small = store(low if wrapped else fn, net, x, *cache, **options)
    assert isinstance(small, Summed)
    assert small.cache is not net.cache
    kernels = (jax.tree.leaves(layer.kernel)[0] for layer in (small.first, small.second))
    assert [str(kernel.dtype) for kernel in kernels] == [dtype] * 2
    assert small.norm.scale[...].dtype == jnp.float32
    assert not any(leaf.any() for leaf in jax.tree.leaves((net.cache, cache)))
    nnx.jit(low)(small, x, *cache)
    assert all(leaf.any() for leaf in jax.tree.leaves(cache or small.cache))
