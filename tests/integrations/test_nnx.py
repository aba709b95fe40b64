"""Autocast of functions of Flax NNX modules: their state and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast.integrations.nnx import autocast
from tests.support.nnx_models import (
    HALF,
    X,
    assert_same_state,
    bf16,
    new_net,
)

# --- state ----------------------------------------------------------------------------------


@functools.cache
def after_one_call():
    net = new_net()
    return net, nnx.jit(lambda m, x: m(x))(net, X)


def test_metrics_and_rngs_as_arguments():
    class Total(nnx.Metric):
        def __init__(self):
            self.value = nnx.metrics.MetricState(jnp.array(0.0))

        def update(self, x):
            self.value[...] += jnp.sum(x)

    @bf16
    def step(metric, rngs, x):
        metric.update(x @ x.T)
        return jax.random.key_data(rngs.noise())

    metric, rngs, same = Total(), nnx.Rngs(noise=0), nnx.Rngs(noise=0)
    for _ in range(2):
        np.testing.assert_array_equal(step(metric, rngs, X), jax.random.key_data(same.noise()))
    assert rngs.noise.count[...] == 2
    np.testing.assert_allclose(metric.value[...], 2 * (X @ X.T).sum(), rtol=HALF["bfloat16"])


@pytest.mark.parametrize("output_dtype", ["computed", "float16", "bfloat16"])
def test_state_keeps_its_dtype_whatever_the_outputs_get(output_dtype):
    net, (want, _) = new_net(), after_one_call()
    out = nnx.jit(lambda net: bf16(net, output_dtype=output_dtype)(X))(net)
    assert out.dtype == ("bfloat16" if output_dtype == "computed" else output_dtype)
    assert_same_state(net, want, HALF["bfloat16"])
    mean = net.norm.mean[...]  # float32 throughout
    assert (mean != mean.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_attributes_may_come_change_and_go():
    @bf16
    def fn(net, x):
        net.seen = nnx.Intermediate(x @ x.T)
        net.extra = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        net.alias = net.norm
        net.mode = "seen"
        net.calls.set_metadata("unit", "calls")
        del net.cache
        return net.extra(x)

    net = new_net()
    norm, kernel = net.norm, net.head.kernel
    assert fn(net, X).shape == (8, 2)
    np.testing.assert_allclose(net.seen[...], X @ X.T, rtol=0.05, atol=0.05)
    assert net.extra.kernel[...].dtype == "float32"
    assert net.mode == "seen"
    assert net.calls.get_metadata("unit") == "calls"
    assert not hasattr(net, "cache")
    # What was there is the same object.
    assert net.alias is net.norm
    assert (net.norm, net.head.kernel) == (norm, kernel)
    assert net.head.kernel is kernel


def test_results_may_hold_modules_and_static_leaves():
    net = new_net()
    same, block, new, text = bf16(
        lambda net: (net, {"block": net.norm}, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "text")
    )(net)
    assert same is net
    assert block["block"] is net.norm
    assert isinstance(new, nnx.Linear)
    assert text == "text"
    assert not any("jmp" in name for m in (net, new) for name in vars(m))


# --- transformations and gradients ----------------------------------------------------------


@pytest.mark.usefixtures("jit_caches")
def test_equal_wrappers_do_not_trace_again():
    traces = []

    def fn(x):
        traces.append(None)
        return x * x

    for _ in range(3):
        jax.jit(bf16(fn))(X)
    assert len(traces) == 1
    assert bf16(fn) == bf16(fn) != autocast(fn)
    net = new_net()
    assert bf16(net) == bf16(net) != bf16(net.__call__) == bf16(net.__call__)
    assert hash(bf16(net)) == hash(bf16(net))
