"""Matmuls that a guard, or a request, keeps in float32: who did not look is told, once."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, FP16, autocast, explain, full_precision
from tests.support.jaxprs import assert_dots_run_in, trace

ROWS = 1024
W = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
RULES = {"dot_general": "LOWER_PRECISION_FP"}


def positions(w, x):
    with jax.named_scope("angles"):
        return jnp.arange(float(ROWS)) @ w + x[:2] @ w


def large_constant(w, x):
    return np.full((1, ROWS), 1e5, np.float32) @ w


def repeated(w, x):
    def step(carry, _):
        return carry + jnp.arange(8.0) @ w[:8, :8], None

    return jax.lax.scan(step, x[0, :8], length=10**5)[0]


def small(w, x):
    return jnp.arange(8.0) @ w[:8, :8]


def small_share(w, x):
    return jnp.arange(float(ROWS)) @ w + (x @ w) @ (x @ w)


def outer_product(w, x):
    return jnp.arange(float(ROWS))[:, None] @ w[:1]


def all_requested(w, x):
    with jax.named_scope("logits"):
        return jnp.matmul(x, w, precision="highest")


def half_requested(w, x):
    return all_requested(w, x @ w @ w)


def asked_for(w, x):
    with full_precision():
        return positions(w, x)


def on_trace(fn, policy):
    """Returns the warnings of a call, of its gradient under ``jit``, and of a second call."""
    run = autocast(fn, policy=policy)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        jax.eval_shape(jax.jit(jax.grad(lambda w, x: run(w, x).sum())), W, W)
        for _ in range(2):
            jax.eval_shape(run, W, W)
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize(
    ("fn", "policy", "said"),
    [
        (positions, BF16, ["33 %", "positions", "'angles'", "COORD"]),
        (large_constant, FP16, ["100 %", "large_constant", "no scope", "LITERAL", "exceeds"]),
        (repeated, BF16, ["100 %", "COORD, operand 0 holds evenly spaced positions"]),
        (all_requested, BF16, ["100 %", "'logits'", "USER_PRECISION, precision=", "HIGHEST"]),
    ],
    ids=["positions", "constant", "in_a_loop", "requested"],
)
def test_a_product_that_a_guard_keeps_is_told_once(fn, policy, said):
    (message,) = set(on_trace(fn, policy))
    assert all(words in message for words in said)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="autocast keeps")
        jax.eval_shape(autocast(fn, policy=policy), W, W)


@pytest.mark.parametrize(
    ("fn", "policy"),
    [
        (small, BF16),
        (small_share, BF16),
        (outer_product, BF16),
        (large_constant, BF16),
        (half_requested, BF16),
        (asked_for, BF16),
        (positions, BF16.with_rules({"*": "float32"}, scope="angles")),
        (positions, BF16.with_rules(RULES, scope="angles")),
        (large_constant, FP16.with_rules(RULES)),
    ],
)
def test_nothing_is_told_of_little_or_of_what_the_user_chose(fn, policy):
    assert on_trace(functools.partial(fn), policy) == []


@pytest.mark.parametrize(
    ("fn", "policy"), [(positions, BF16), (large_constant, FP16), (all_requested, BF16)]
)
def test_the_rule_that_the_message_names_lowers_the_product(fn, policy):
    (message,) = set(on_trace(fn, policy))
    assert 'policy.with_rules({"dot_general": "LOWER_PRECISION_FP"}' in message
    scope = {positions: "angles", all_requested: "logits"}.get(fn)
    assert (f"scope={scope!r}" in message) == (scope is not None)
    lowered = autocast(fn, policy=policy.with_rules(RULES, scope=scope or "*"))
    args = [np.ones(W.shape, np.float32)] * 2
    assert_dots_run_in(policy.compute_dtype, trace(lowered, *args))


def test_a_product_of_few_that_the_program_rounds_has_float32_operands():
    """Its result is rounded, and not what nearly cancels in it: 1,001 less 1,000 was 0."""

    def turned(w, x):
        near = -jnp.cumsum(x, -1)
        return jnp.dot(near, w, preferred_element_type=jnp.bfloat16)

    w, x = np.float32([[1.0], [-1.0]]), np.float32([[1000.0, 1.0], [1001.0, 3.0]])
    found = autocast(turned, policy=BF16, params=0)(w, x)
    np.testing.assert_array_equal(np.asarray(found, np.float32), [[1.0], [3.0]])


def test_explain_says_how_many_and_why():
    report = explain(positions, W, W, policy=BF16)
    share, kept = report.summary.split("; ")
    assert share == "positions: 66.7 % of matmul and convolution FLOPs in bfloat16"
    assert kept == "COORD keeps 33.3 % in float32"
    assert report.totals.guarded_contraction_flops == 2 * ROWS**2
    assert "COORD (operand 0 holds evenly spaced positions)" in str(report)
    assert explain(asked_for, W, W, policy=BF16).totals.guarded_contraction_flops == 0
