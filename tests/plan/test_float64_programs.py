"""float64 programs with products in float32: the planner one step up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import (
    CastPolicy,
    Decision,
    Policy,
    autocast,
    compute_precision as in_dtype,
    explain,
    full_precision,
)
from jmp_autocast.interpreters import ValueState
from jmp_autocast.interpreters.plan.value_facts import fold
from tests.support.jaxprs import equations, floats_of, trace

LOW, FULL = np.dtype("float32"), np.dtype("float64")
SINGLE = Policy("float32")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 8))
W = RNG.standard_normal((8, 8)) / 3


pytestmark = pytest.mark.usefixtures("float64")


def single(fn, policy=SINGLE, **options):
    return autocast(fn, policy=policy, **options)


def dtypes(fn, *args):
    return floats_of(trace(fn, *args))


def layer(w, x):
    return jnp.mean(jax.nn.log_softmax(jnp.tanh(x @ w)) ** 2)


def test_products_are_float32_and_sums_float64():
    found = dtypes(single(layer), W, X)
    assert found["dot_general"] == found["tanh"] == {LOW}
    assert found["exp"] == found["reduce_sum"] == found["log"] == {FULL}


@pytest.mark.parametrize("level", ["tensor_cores", "o1", "compute"])
def test_values_and_gradients_are_those_of_float64_but_for_the_rounding_of_products(level):
    fn = single(layer, SINGLE.with_level(level))
    assert fn(W, X).dtype == FULL
    np.testing.assert_allclose(fn(W, X), layer(W, X), rtol=1e-6)
    gradient = jax.grad(fn)(W, X)
    assert gradient.dtype == FULL
    scale = np.abs(jax.grad(layer)(W, X)).max()
    np.testing.assert_allclose(gradient, jax.grad(layer)(W, X), atol=1e-6 * scale)
    # Not float64 throughout: the products do round.
    assert fn(W, X) != layer(W, X)


def test_a_gradient_of_many_uses_adds_up_in_float64():
    def uses(w):
        return sum(jnp.tanh(w * 1e-9 + X[0]) @ w for _ in range(3))

    backward = equations(trace(jax.grad(single(uses, params=0)), W[0]))
    sums = [e for e in backward if e.primitive.name == "add_any"]
    assert sums
    assert all(e.outvars[0].aval.dtype == FULL for e in sums)


@pytest.mark.parametrize("level", ["o1", "compute"])
def test_a_carry_that_a_body_returns_wider_than_it_took_it(level):
    # NumPy says that np.dtype("float64") equals None, which here means "no float".
    def outer(x, _):
        def inner(carry, _):
            q, r = carry
            q = q + r / jnp.dot(q, W @ q) * q
            return (q, jnp.dot(q, q)), None

        start = x - W @ x
        return x + lax.scan(inner, (start, jnp.dot(start, start)), None, length=2)[0][0], None

    fn = lambda x: lax.scan(outer, x, None, length=2)[0]
    mixed = single(fn, SINGLE.with_level(level), params=())
    np.testing.assert_allclose(jax.jit(mixed)(X[0]), jax.jit(fn)(X[0]), rtol=1e-4)


@pytest.mark.parametrize(
    ("value", "code"),
    [(1e300, "LITERAL"), (1e-300, "LITERAL"), (1 - 1e-12, "LITERAL"), (0.5, "PROMOTE_LOW")],
)
def test_a_literal_that_float32_cannot_hold_keeps_float64(value, code):
    report = explain(lambda x: ((x @ W) * value) @ W, X, policy=SINGLE)
    assert [row.reason for row in report.rows if row.primitive == "mul"] == [code]


def test_what_is_known_is_folded_in_float64():
    two = ValueState(FULL, known_value=2.0)
    assert fold("sqrt", [two], FULL) == 2**0.5 != fold("sqrt", [two], LOW)


def test_regions_and_rules_name_the_two_dtypes():
    def region(x):
        with full_precision():
            return x @ W

    for fn in (
        single(region),
        single(lambda x: x @ W, SINGLE.with_scopes({"*": "float64"})),
        single(lambda x: x @ W, SINGLE.with_rules({"dot_general": "float64"})),
    ):
        assert dtypes(fn, X)["dot_general"] == {FULL}

    def low(x):
        with in_dtype("float32"):
            return x @ W

    assert dtypes(single(low), X)["dot_general"] == {LOW}
    assert dtypes(single(low, SINGLE.with_scopes({"*": "float64"})), X)["dot_general"] == {LOW}
    with pytest.raises(ValueError, match="Unknown policy 'float32'"):
        SINGLE.with_rules({"dot_general": "float32"})


def test_a_mark_for_16_bits_is_refused():
    def low(x):
        with in_dtype("bfloat16"):
            return x @ W

    with pytest.raises(ValueError, match=r"scope bfloat16 asks for bfloat16 .* Write one of these"):
        single(low)(X)


def test_a_rule_for_16_bits_is_refused():
    decide = lambda eqn: Decision(policy=CastPolicy.FP32, output_dtype="bfloat16")
    with pytest.raises(
        ValueError, match=r"'exp' decided output_dtype=bfloat16, .* casts only float64 or float32"
    ):
        single(jnp.exp, SINGLE.with_rules({"exp": decide}))(X)
    wide = lambda eqn: Decision(policy=CastPolicy.FP32, output_dtype="float64")
    with pytest.raises(ValueError, match="'exp' decided output_dtype=float64"):
        autocast(jnp.exp, policy=Policy("bfloat16").with_rules({"exp": wide}))(np.float32(X))


def test_float16_arrays_of_a_float64_program_stay():
    half = np.float16(X)
    products = lambda h, x: (h @ h.T, x @ x.T)
    assert dtypes(single(products), half, X)["dot_general"] == {LOW, half.dtype}
    assert single(products)(half, X)[0].dtype == np.float16


def test_a_float32_program_is_left_alone_with_a_sentence():
    x = np.float32(X)
    with pytest.warns(UserWarning, match="holds no float64 array"):
        out = single(lambda x: x @ x.T)(x)
    assert out.dtype == LOW


def test_no_float64_no_program():
    with jax.enable_x64(False), pytest.raises(ValueError, match="while jax_enable_x64 is off"):
        single(layer)(np.float32(W), np.float32(X))


def test_a_policy_is_read_from_strings_and_files(tmp_path):
    policy = SINGLE.with_scopes({"*/residual": "float64"})
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy
    fn = single(layer, "params=float64,compute=float32,output=float64")
    assert dtypes(fn, W, X) == dtypes(single(layer), W, X)
    with pytest.raises(ValueError, match="params must be float64, got float32"):
        single(layer, "params=float32,compute=float32")
    with pytest.raises(ValueError, match="params must be float32, got float64"):
        single(layer, "params=float64,compute=bfloat16")


def test_explain_names_both_dtypes():
    report = explain(layer, W, X, policy=SINGLE)
    assert (report.compute_dtype, report.wide_dtype) == ("float32", "float64")
    assert "100.0 % of matmul and convolution FLOPs in float32" in report.summary
    assert report.totals.low_share == 1
    assert report.totals.casts.down > 0 < report.totals.casts.up
    assert set(report.by_dtype()) >= {"float32", "float64"}
    as_it_runs = explain(jax.jit(single(layer)), W, X)
    assert (as_it_runs.totals.low_share, as_it_runs.wide_dtype) == (1, "float64")
