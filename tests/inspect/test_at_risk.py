"""The equations at risk of a program written in 16 bits: the planner raises them to float32."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, autocast, explain, full_precision

F16, B16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def shape(*sizes, dtype=B16):
    return jax.ShapeDtypeStruct(sizes, dtype)


X = shape(64, 64)
X16 = shape(64, 64, dtype=F16)


def risks(fn, *args):
    return [(risk.primitive, risk.reason) for risk in explain(fn, *args).at_risk]


def running_sum(x):
    return lax.scan(lambda c, y: (c + y, None), jnp.zeros((), x.dtype), x[0])[0]


def layers(stacked, x):
    return lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w), None), x, stacked)[0]


def in_a_branch(x):
    return lax.cond(x[0, 0] > 0, jnp.exp, jnp.tanh, x)


@jax.custom_vjp
def with_a_rule(x):
    return jnp.log(x)


with_a_rule.defvjp(lambda x: (jnp.log(x), x), lambda x, ct: (ct / x,))


# The listed primitives and reasons; the program, and its arguments.
RISKY = {
    "sum": ("reduce_sum FP32", lambda x: jnp.sum(x, 0, dtype=x.dtype), X),
    "rows added": ("scatter-add FP32", lambda x: x.at[jnp.zeros(64, jnp.int32)].add(x), X),
    "bias gradient": (
        "reduce_sum FP32",
        jax.grad(lambda b, x: jnp.sum((x + b).astype(F32))),
        shape(64),
        X,
    ),
    "running sum": ("scan CARRY_ACCUMULATOR", running_sum, X),
    "residual stream": ("scan CARRY_ACCUMULATOR, add ACCUMULATOR", layers, shape(24, 64, 64), X),
    "softmax": ("exp FP32", jax.nn.softmax, X),
    "norm": ("rsqrt FP32", lambda x: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3), X),
    "a gate": ("logistic LOG_GUARD", lambda x: 1 - jax.nn.sigmoid(x), X),
    "mask": ("select_n LITERAL", lambda x: jnp.where(x > 0, x, -1e9), X16),
    "branch": ("exp FP32", in_a_branch, X),
    "rule": ("log FP32", with_a_rule, X),
    "checkpoint": ("exp FP32", jax.checkpoint(lambda x: jnp.exp(x)), X),
}


# A warning of JAX if it rounds a number of the program to an infinity.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", RISKY)
def test_what_the_planner_raises_is_listed(name):
    expected, fn, *args = RISKY[name]
    assert [" ".join(pair) for pair in risks(fn, *args)] == expected.split(", ")
    # The same program in float32 has nothing at risk.
    wide = jax.tree.map(lambda x: shape(*x.shape, dtype=F32), args)
    assert risks(fn, *wide) == []


def attention(q, k, v):
    scores = jnp.einsum("td,sd->ts", q, k, preferred_element_type=F32)
    scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), scores, -1e9)
    return jax.nn.softmax(scores).astype(q.dtype) @ v


def careful_norm(x, scale):
    wide = x.astype(F32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(
        x.dtype
    ) * scale


def chosen(x):
    with full_precision():
        return jnp.exp(x)


FINE = {
    "matmul": (jnp.matmul, X, X),
    "variance": (lambda x: jnp.var(x, -1), X),
    "attention": (attention, X, X, X),
    "norm": (careful_norm, X, shape(64)),
    "own infinity": (lambda x: jnp.where(x > 0, x, -jnp.inf), X16),
    "residual": (lambda params, x: x + x @ params["w"], {"w": X}, X),
    "a chosen precision": (chosen, X),
    "autocast": (autocast(lambda x: jnp.exp(x @ x), policy=BF16), X),
    "autocast inside": (jax.jit(autocast(lambda x: jnp.exp(x @ x), policy=BF16)), X),
    "gelu": (jax.nn.gelu, X),
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_fine_is_not_listed(name):
    assert risks(*FINE[name]) == []


W = shape(64, 64, dtype=F32)
# What autocast leaves at risk: the primitive, if any; the program.
LEFT = {
    "difference": ("sub", lambda x, w: x @ w - w @ x),
    "negated": ("add", lambda x, w: x @ w + -2.0 * (w @ x).T),
    "shifted": ("sub", lambda x, w: (x @ w + w[0]) - (1.0 - w @ x) * -1.0),
    "inside": ("sub", lambda x, w: jax.jit(lambda a, b: a - b)(x @ w, w @ x)),
    "solve": ("cholesky", lambda x, w: jnp.linalg.cholesky(1.0 / jnp.cosh(x @ w).sum(0) + x)),
    "loop": ("cholesky", lambda x, w: jnp.linalg.cholesky(layers(w[None], x).mean() * x)),
    "frequencies": ("sin", lambda x, w: jnp.sin(30 * (x @ w)) @ w),
    "sum": ("", lambda x, w: x @ w + w @ x),
    "two negatives": ("", lambda x, w: x @ w - -(w @ x)),
    "residual": ("", lambda x, w: x @ w - x),
    "a gate": ("", lambda x, w: x @ w - jnp.tanh(w @ x)),
    "average": ("", lambda x, w: x @ w - (x @ w).mean(0)),
    "rescued": ("", lambda x, w: (x * x) @ jnp.full((64, 1), 1 / 64) - (x @ w) ** 2 * 0),
    "positions": ("", lambda x, w: jnp.sin(jnp.arange(64.0) * w[0]) * (x @ w)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_at_risk_is_listed(name):
    expected, fn = LEFT[name]
    words = {"sub": "cancel", "add": "cancel", "cholesky": "condition", "sin": "angle"}
    for policy in (BF16, FP16):
        for risk in (found := explain(autocast(fn, policy=policy), W, W).at_risk):
            assert (risk.reason, risk.dtype) == ("LEFT", str(policy.compute_dtype))
            assert words[expected] in risk.because
        assert [risk.primitive for risk in found] == [expected][: bool(expected)]


@pytest.mark.parametrize("policy", [BF16, FP16, None])
def test_the_dtype_is_the_programs_own(policy):
    report = explain(lambda x, y: (jnp.exp(x), jnp.log(y)), X, X16, policy=policy)
    found = {(risk.primitive, risk.dtype) for risk in report.at_risk}
    assert found == {("exp", "bfloat16"), ("log", "float16")}


def test_a_risk_names_its_line_its_scope_and_its_reason():
    def model(x):
        x = 1 - jax.nn.sigmoid(x)
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.exp(x)
        return x

    report = explain(model, X)
    gate, exp = report.at_risk
    assert (exp.equations, exp.scope) == (3, "layer_0")
    assert "test_at_risk.py" in exp.source
    assert exp.because == "The operation loses too much in 16 bits."
    assert gate.because.startswith("It is read by what ranks it, takes a difference of it")
    text = str(report)
    assert "\nat risk" in text
    assert text.count("  at /") == 2
    assert json.loads(report.to_json())["at_risk"][1]["primitive"] == "exp"


def test_the_reason_of_a_number_is_the_number():
    (risk,) = explain(lambda x: jnp.where(x > 0, x, -1e9), X16).at_risk
    assert risk.because == "-1e+09 has no float16 value."
