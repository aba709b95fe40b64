"""A residual stream is an accumulator: float32 at the default level, whatever it begins with."""

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, Policy
from jmp_autocast.interpreters import Source
from tests.support.numerics import normal
from tests.support.plans import FULL, LOW, all_equations, plan_of

LAYERS = 4
PARAMS = normal(0, embed=(12, 16), token=(1, 1, 16), positions=(1, 9, 16), w=(LAYERS, 16, 16))
PATCHES = normal(1, x=(8, 8, 12))["x"]
LEAVES = (Source.PARAM,) * len(PARAMS) + (Source.DATA,)


def norm(x):
    """As a LayerNorm: it reads the stream in float32."""
    mean, square = jnp.mean(x, -1, keepdims=True), jnp.mean(x * x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0) + 1e-5)


def layers(params, x):
    for w in params["w"]:
        x = x + jnp.tanh(norm(x) @ w) @ w
    return norm(x) @ params["w"][0]


def vision(params, patches):
    """Patches behind a class token, with learned positions."""
    x = patches @ params["embed"]
    token = jnp.broadcast_to(params["token"], (8, 1, 16))
    return layers(params, jnp.concatenate([token, x], 1) + params["positions"])


def language(params, patches):
    """Rows of a table, with learned positions: parameters, which are float32."""
    ids = jnp.arange(8 * 9).reshape(8, 9) % 12
    return layers(params, params["embed"][ids] + params["positions"]) + jnp.sum(patches)


def prompted(params, patches):
    """More rows of parameters than of the product."""
    prompt = jnp.broadcast_to(params["positions"][:, 1:], (8, 8, 16))
    x = jnp.concatenate([prompt, patches[:, :1] @ params["embed"]], 1)
    return layers(params, x + params["positions"])


def from_data(params, patches):
    return layers({**params, "w": params["w"][:, :12, :12]}, patches)


def stream(fn, policy=BF16):
    """The dtypes of the results of the sums that are as large as the stream."""
    plan = plan_of(fn, PARAMS, PATCHES, policy=policy, leaves=LEAVES)
    found = [
        p.results[0].dtype
        for eqn, p in all_equations(plan)
        if eqn.primitive.name == "add" and len({v.aval.shape for v in eqn.invars}) == 1
    ]
    return [dtype for dtype in found if dtype is not None][:LAYERS]


@pytest.mark.parametrize("fn", [vision, language, prompted, from_data])
def test_a_stream_is_an_accumulator(fn):
    assert stream(fn) == [FULL] * LAYERS


def test_at_level_compute_a_stream_of_patches_is_16_bits_as_by_hand():
    assert stream(vision, Policy(jnp.bfloat16, level="compute")) == [LOW] * LAYERS


@pytest.mark.parametrize("call", [lambda fn: fn, jax.jit], ids=["flat", "jit"])
@pytest.mark.parametrize("also_computed", [False, True])
def test_moves_are_no_reason_to_raise_what_leads_to_a_stream(call, also_computed):
    """The float32 stream of a ViT took over the layout of its patch convolution."""
    to_rows = call(lambda token, x: jnp.concatenate([token, x.reshape(8, 8, 16)], 1))

    def fn(params, patches):
        x = patches.reshape(64, 12) @ params["embed"] + params["positions"][0, 0]
        rows = to_rows(jnp.broadcast_to(params["token"], (8, 1, 16)), x) + params["positions"]
        return layers(params, rows + jnp.mean(x * x) if also_computed else rows)

    plan = plan_of(fn, PARAMS, PATCHES, policy=BF16, leaves=LEAVES)
    sums = [p.results[0].dtype for eqn, p in all_equations(plan) if eqn.primitive.name == "add"]
    assert sums[0] == (FULL if also_computed else LOW)
    assert sums[1] == FULL
    assert stream(fn) == [FULL] * LAYERS


def test_a_sum_of_a_source_is_no_stream():
    """`w + a @ b` may be far larger than the product: a norm reads it in float32, as before."""

    def fn(params, patches):
        x = jnp.tanh(patches @ params["embed"]) + params["token"]
        x = x + norm(x) @ params["w"][0]
        return norm(x) @ params["w"][1]

    assert stream(fn) == [FULL]


def test_one_sum_behind_another_is_fused_and_not_rounded():
    """Nothing else reads the first sum, so that its float32 value is stored nowhere."""

    def fn(params, patches):
        x = patches @ params["embed"]
        return jnp.sum((x + x @ params["w"][0] + x @ params["w"][1]) ** 2)

    assert stream(fn) == [FULL, FULL]


def test_slopes_of_a_solver_are_no_stream():
    """They are read in float32 and added up, too, and nothing norms them."""

    def step(params, y):
        w, bias = params["w"][0, :12, :12], params["token"][0, 0, :12]
        first = y @ w + bias
        second = (y + 0.5 * first) @ w + bias
        return y + 0.1 * (first + 2.0 * second)

    plan = plan_of(step, PARAMS, PATCHES, policy=BF16, leaves=LEAVES)
    sums = [p.results[0].dtype for eqn, p in all_equations(plan) if eqn.primitive.name == "add"]
    assert sums == [FULL] * 5


def test_a_stream_goes_through_a_broadcast_that_is_undone():
    """In bfloat16 it lost 73 % of its branches."""

    def fn(params, patches):
        x = patches @ params["embed"]
        for w in params["w"]:
            x = x + jnp.tanh(norm(x) @ w) @ w
            x = jnp.broadcast_to(x, (2, *x.shape))[0]
        return norm(x) @ params["w"][0]

    assert stream(fn) == [FULL] * LAYERS
