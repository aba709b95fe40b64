"""`compare` finds the equation that introduces an error, and compares gradients."""

import json

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp_autocast import BF16, FP16, Policy, autocast, compare, full_precision
from jmp_autocast.inspect.measure.error_probe import COMPUTED, distance
from tests.fuzz.program import jax_settings
from tests.fuzz.strategies import cases, examples

W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32) / 3
X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)


# By default a sum with 100 is in float32: this level rounds it.
ROUGH = Policy("bfloat16", level="compute")


def cancelled(y):
    with jax.named_scope("cancellation"):
        return (y + jnp.float32(100)) + jnp.float32(-100)


def plain(params, x):
    return jnp.mean((cancelled(jax.nn.relu(x @ params["w"])) @ params["w"]) ** 2)


def in_scan(params, x):
    def layer(h, _):
        return jnp.tanh(cancelled(h @ params["w"]) @ params["w"]), None

    return jnp.mean(lax.scan(layer, x, length=3)[0])


def in_branch(params, x):
    h = x @ params["w"]
    return jnp.mean(lax.cond(jnp.sum(x) < 1e9, cancelled, jnp.sin, h) @ params["w"])


def in_while(params, x):
    def body(state):
        i, h = state
        return i + 1, cancelled(h @ params["w"]) @ params["w"]

    return jnp.mean(lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1])


def in_checkpoint(params, x):
    return jnp.mean(jax.checkpoint(lambda w, x: cancelled(x @ w) @ w)(params["w"], x))


def in_jit(params, x):
    return jnp.mean(jax.jit(cancelled)(x @ params["w"]) @ params["w"])


FUNCTIONS = {f.__name__: f for f in (plain, in_scan, in_branch, in_while, in_checkpoint, in_jit)}
INSIDE = {"in_scan": ("scan",), "in_branch": ("cond",), "in_while": ("while",)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_cancellation_introduces_the_largest_error(name):
    worst = compare(FUNCTIONS[name], {"w": W}, X, policy=ROUGH).rows[0]
    assert (worst.primitive, worst.scope) == ("add", "cancellation")
    assert worst.computed == "bfloat16"
    assert worst.inside == INSIDE.get(name, ())
    assert "test_compare.py" in worst.source
    assert "cancelled" in worst.source
    assert worst.introduced > 0.1


def test_nothing_is_introduced_where_nothing_is_rounded():
    def f(params, x):
        with full_precision():
            return plain(params, x)

    comparison = compare(f, {"w": W}, X, policy=BF16, argnums=0)
    assert {row.introduced for row in comparison.rows} == {0.0}
    assert comparison.outputs[0].error == 0
    assert comparison.gradients["0/w"].error == 0


@pytest.mark.parametrize(
    ("name", "policy"),
    [("plain", FP16), ("in_scan", BF16), ("in_branch", BF16), ("in_checkpoint", FP16)],
)
def test_gradients_are_those_of_the_program_that_trains(name, policy):
    fn = FUNCTIONS[name]
    # A cancellation magnifies differences of XLA's fusions.
    gradient = {}
    for key, f in (("full", fn), ("mixed", autocast(fn, policy=policy))):
        gradient[key] = np.asarray(jax.jit(jax.grad(f))({"w": W}, X)["w"], np.float64)
    difference = np.linalg.norm(gradient["mixed"] - gradient["full"])
    expected = difference / np.linalg.norm(gradient["full"])
    found = compare(fn, {"w": W}, X, policy=policy, argnums=0).gradients["0/w"].error
    assert found == pytest.approx(expected, rel=0.3)


def test_an_overflow_is_infinite_where_it_arises():
    def f(x):
        with jax.named_scope("square"):
            y = x @ x.T
            return (y * y) @ x

    comparison = compare(f, jnp.full((8, 8), 10.0), policy=FP16)
    worst = comparison.rows[0]
    assert (worst.primitive, worst.scope) == ("mul", "square")
    assert (worst.introduced, worst.error) == (np.inf, np.inf)
    assert worst.introduced_lost == worst.lost == 64
    assert "overflow" in comparison.summary
    assert json.loads(comparison.to_json())["rows"][0]["error"] == "inf"


def test_gradients_that_vanish_in_float16():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) @ w) * jnp.float32(1e-9)

    comparison = compare(loss, W, X, policy=FP16, argnums=0)
    assert comparison.gradients["0"].error == pytest.approx(1.0)


def transposed(w, x):
    return jnp.sum(jnp.tanh(x @ w.T))


def transposed_in_a_call(w, x):
    return jnp.sum(jnp.tanh(x @ jax.jit(jnp.transpose)(w)))


def in_a_call_that_is_kept(w, x):
    with full_precision():
        y = jax.jit(lambda x: jnp.sin(x) * 2.0)(x @ w.T)
    return jnp.sum(jnp.tanh(y @ w))


@pytest.mark.parametrize("fn", [transposed, transposed_in_a_call, in_a_call_that_is_kept])
def test_a_backward_pass_has_rows_of_its_own(fn):
    """Also for a moved weight, and for a call that runs as it is."""
    rows = compare(jax.grad(fn), W, X, policy=BF16).rows
    backward = [row for row in rows if row.backward]
    assert {"dot_general", "mul"} <= {row.primitive for row in backward}
    assert all(row.error < 0.1 for row in backward)
    assert compare(fn, W, X, policy=BF16, argnums=0).gradients["0"].error < 0.02


DISTANCES = {
    "huge": ([3e38, 1e38], [3e38, 1e38], 0.0, 0),
    "tiny": ([2e-38, 2e-38], [2e-38, 4e-38], np.sqrt(0.5), 0),
    "zero and zero": ([0.0, 0.0], [0.0, 0.0], 0.0, 0),
    "zero and something": ([0.0, 0.0], [0.0, 1.0], np.inf, 0),
    "lost": ([1.0, 2.0], [1.0, np.inf], np.inf, 1),
    "infinite in both": ([1.0, np.inf], [1.0, np.inf], 0.0, 0),
    "NaN in the reference": ([1.0, np.nan], [1.0, 5.0], 0.0, 0),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_at_the_edges(name):
    reference, result, error, lost = DISTANCES[name]
    found = distance(jnp.array(reference, jnp.float32), jnp.array(result, jnp.float32))
    assert float(found.error) == pytest.approx(error, rel=1e-5)
    assert int(found.lost) == lost


@examples(5)
@hypothesis.given(cases(without=["autocast("]))
def test_random_programs_are_compared(case):
    with jax_settings(case.program.x64):
        comparison = compare(case.cast, *case.args)
    for row in comparison.rows:
        assert row.computed in COMPUTED
        assert row.introduced >= 0


def attention_loss(params, x):
    q, k, v = (x @ params[name] for name in "qkv")
    scores = q @ (k + params["key bias"]).T / 4
    return jnp.sum(jnp.square(jax.nn.softmax(scores) @ v))


def test_a_gradient_that_is_zero_but_for_rounding_does_not_lead():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {n: jax.random.normal(k, (16, 16)) / 4 for n, k in zip("qkv", keys, strict=False)}
    params["key bias"] = jnp.ones(16)  # softmax ignores what it adds
    x = jax.random.normal(keys[3], (12, 16))
    comparison = compare(attention_loss, params, x, policy=BF16, argnums=0)
    bias = comparison.gradients["0/key bias"]
    assert bias.error > 1 > 0.05 > bias.share
    assert max(comparison.gradients.values(), key=lambda each: each.share) != bias
    assert 1e-4 < comparison.gradient_error < 0.05
    assert f"gradients by {comparison.gradient_error:.2g}" in comparison.summary


@pytest.mark.parametrize("policy", [BF16, FP16])
def test_the_mask_of_a_softmax_is_no_overflow(policy):
    def attention(x):
        scores = jnp.where(jnp.tri(8, dtype=bool), x @ x.T, jnp.finfo(jnp.float32).min)
        return jax.nn.softmax(scores) @ x

    comparison = compare(attention, jax.random.normal(jax.random.key(0), (8, 8)), policy=policy)
    assert "overflow" not in comparison.summary
    assert max(row.introduced for row in comparison.rows) < 0.01


def test_equal_layers_compile_nothing_more(jit_caches, caplog):
    def stacked(layers):
        def fn(params, x):
            for _ in range(layers):
                x = cancelled(jnp.tanh(x @ params["w"]))
            return x

        return fn

    # No other test has these shapes, so nothing is compiled yet.
    w, x = jnp.eye(19) / 2, jnp.ones((17, 19))

    def programs(layers):
        caplog.clear()
        with jax.log_compiles():
            compare(stacked(layers), {"w": w}, x, policy=BF16)
        return sum("Finished XLA compilation" in r.message for r in caplog.records)

    assert programs(2) > 10
    # Only the readings of all measurements, whose number differs: positions, errors, and three
    # operations around them.
    assert programs(6) <= 5


P = {"w": W, "b": np.ones(8, np.float32) / 7, "g": np.ones(8, np.float32) / 3}


def head(p, x):
    with jax.named_scope("body"):
        h = checkpoint_name(jax.nn.relu(x @ p["w"]), "hidden")
    with jax.named_scope("<script>offset"):
        h = (h + jnp.float32(100)) + jnp.float32(-100)
    with jax.named_scope("logits"), jax.named_scope("last"):
        return jax.nn.log_softmax(h @ p["w"])


def test_errors_by_scope():
    def loss(p, x):
        return -jnp.mean(head(p, x)[:, 0])

    comparison = compare(loss, P, X, policy=ROUGH)
    found = comparison.by_scope()
    offset = found["<script>offset"]
    assert list(found)[:3] == ["body", "<script>offset", "logits/last"]
    assert found["body"].introduced < 0.02 < 0.1 < offset.introduced
    assert list(comparison.by_scope(depth=1))[2] == "logits"
    assert "by scope" in str(comparison)
    assert max(map(len, str(comparison).splitlines())) <= 100


def test_gradients_of_a_value_that_training_does_not_differentiate():
    """Equinox rejects differentiable operands of a function without a rule for them."""

    @eqx.filter_custom_vjp
    def scaled(y, by):
        return y * by

    scaled.def_fwd(lambda perturbed, y, by: (y * by, None))
    scaled.def_bwd(lambda residuals, g, perturbed, y, by: g * by)

    def loss(p, x):
        hidden = jnp.tanh(jnp.sin(x) @ p["w"])
        fixed = jax.lax.stop_gradient(hidden * 2.0)
        return jnp.mean(scaled(hidden, jnp.exp(x)[:, :1]) * fixed)

    comparison = compare(loss, P, X, policy=BF16, argnums=0)
    assert comparison.gradients["0/w"].error < 0.02


AGAINST = {
    "bfloat16": (autocast(head, jnp.bfloat16), 1e-3, 0.5),
    "the same": (lambda p, x: head(p, x), 0.0, 0.0),
    "half of the batch at a time": (
        lambda p, x: jnp.concatenate([jax.jit(head)(p, x[:2]), head(p, x[2:])]),
        0.0,
        1e-5,
    ),
}


@pytest.mark.parametrize("name", AGAINST)
def test_two_programs_are_compared_by_name(name):
    other, low, high = AGAINST[name]
    found = compare(head, P, X, against=other)
    assert low <= found.outputs["0"].difference <= high
    names = [each.name for each in found.values]
    expected = ["body", "hidden", "<script>offset", "logits", "logits/last"]
    # The halves have other shapes than the whole, and are not compared.
    assert (names or list(found.unmatched)) == expected
    assert found.summary.startswith("head against")
    assert max(map(len, str(found).splitlines())) <= 100


def test_against_takes_no_policy():
    with pytest.raises(ValueError, match=r"as they are.*got policy="):
        compare(head, P, X, against=head, policy=BF16)


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_a_nan_is_no_difference_of_0(size):
    """XLA:CPU's maximum drops a NaN among about 4,096 numbers or more."""
    x = np.ones(size, np.float32)
    broken = lambda x: jnp.where(jnp.arange(size) == 5, jnp.nan, x * 2.0)
    (error,) = compare(lambda x: x * 2.0, x, against=broken).outputs.values()
    assert np.isnan(error.difference)
    assert error.lost == 1
