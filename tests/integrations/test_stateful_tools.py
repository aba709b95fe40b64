"""The tools on a model with state: batch statistics, dropout, counters; forward and gradient."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jmp_autocast import BF16, autocast, check_numerics, compare, explain, op_stats, tune
from jmp_autocast.integrations import nnx as integration
from tests.support.nnx_models import X, new_net


def nnx_loss(net, x):
    return jnp.mean(net(x) ** 4)


def test_programs_are_read():
    """`explain` and `op_stats`: of the function, its wrapper, and the gradients of both."""
    args, mixed = (new_net(), X), integration.autocast(nnx_loss, policy=BF16)
    for f in (nnx_loss, nnx.grad(nnx_loss)):
        assert explain(f, *args, compute_dtype="bfloat16").totals.low_share == 1
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
    policy = tune(nnx_loss, [args], tolerance=0.5, argnums=0, level="compute", progress=False)
    assert (policy.compute_dtype, policy.level) == (jnp.float16, "compute")


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
