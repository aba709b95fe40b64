"""`jmp.Policy` in, as ``policy=``, and out, by `to_jmp`."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

from jmp_autocast import BF16, FP16, CastPolicy, Policy, autocast
from jmp_autocast.integrations.jmp import to_jmp
from tests.support.jaxprs import assert_dots_run_in, trace

X = np.ones((4, 4), np.float32)

# A policy, and the dtypes of parameters, computing and output in jmp's.
OUT = {
    "bfloat16": (BF16, ("float32", "bfloat16", "float32")),
    "float16": (FP16, ("float32", "float16", "float32")),
    "an output dtype": (
        Policy("bfloat16", output_dtype="bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
    ),
    "a string": ("params=float32,compute=float16,output=float16", ("float32", *["float16"] * 2)),
    "a default written out": (Policy("bfloat16", level="o1"), ("float32", "bfloat16", "float32")),
}


@pytest.mark.parametrize("name", OUT)
def test_the_three_dtypes(name):
    policy, expected = OUT[name]
    found = to_jmp(policy)
    assert isinstance(found, jmp.Policy)
    dtypes = found.param_dtype, found.compute_dtype, found.output_dtype
    assert tuple(np.dtype(d).name for d in dtypes) == expected


@pytest.mark.parametrize("name", OUT)
def test_there_and_back(name):
    policy, (_, compute, output) = OUT[name]
    fn = autocast(lambda w, x: x @ w["w"], policy=to_jmp(policy))
    jaxpr = trace(fn, {"w": X}, X)
    assert_dots_run_in(compute, jaxpr)
    assert [aval.dtype.name for aval in jaxpr.out_avals] == [output]


LOST = {
    "level": BF16.with_level("compute"),
    "dot_output": Policy("bfloat16", dot_output="consumer"),
    "weight_gradients": Policy("bfloat16", weight_gradients="compute"),
    "rules": BF16.with_rules({"tanh": CastPolicy.FP32}),
    "scopes": BF16.with_scopes({"*/norm": "float32"}),
    "level, rules": BF16.with_level("compute").with_rules({"tanh": CastPolicy.FP32}),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_is_named(name):
    with pytest.warns(UserWarning, match=f"nothing else: {name} of the policy") as caught:
        found = to_jmp(LOST[name])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert found == to_jmp(BF16)


def test_jmp_loss_scale():
    """Gradients too small for float16 survive."""
    scale = jmp.StaticLossScale(jnp.float32(2.0**14))

    def loss(params, x):
        return 1e-6 * jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    def scaled(*args):
        return scale.scale(autocast(loss)(*args))

    got, lost, want = jax.jit(
        lambda *args: (
            scale.unscale(jax.grad(scaled)(*args)),
            jax.grad(autocast(loss))(*args),
            jax.grad(loss)(*args),
        )
    )({"w": X / 4}, X)
    error, error_without = (np.linalg.norm(g["w"] - want["w"]) for g in (got, lost))
    assert got["w"].dtype == "float32"
    assert error <= 4e-3 * np.linalg.norm(want["w"])
    assert error_without > 10 * error
