"""The precision of float32 products: by policy, by scope, by rule, and not against the program."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import BF16, CastPolicy, Decision, Policy, autocast, explain, full_precision
from tests.support.jaxprs import find, trace

X = jnp.ones((8, 8))
IMAGE, KERNEL = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 3, 3))
TF16, TF32 = lax.DotAlgorithmPreset.F16_F16_F16, lax.DotAlgorithmPreset.TF32_TF32_F32
HIGH, HIGHEST = ((level,) * 2 for level in (lax.Precision.HIGH, lax.Precision.HIGHEST))


def program(x):
    low = x @ x
    with jax.named_scope("net/head"):
        head = jnp.dot(x, x)
    with full_precision():
        pinned = x @ x
        asked = jnp.matmul(x, x, precision="high")
    image = lax.conv_general_dilated(IMAGE * x[0, 0], KERNEL, (1, 1), "SAME")
    return low, head, pinned, asked, image


def precisions(policy):
    eqns = find(trace(autocast(program, policy=policy), X), "dot_general", "conv_general_dilated")
    return [(eqn.invars[0].aval.dtype.name, eqn.params["precision"]) for eqn in eqns]


LOW, FULL = "bfloat16", "float32"
RULED = BF16.with_rules(
    {"dot_general": lambda eqn: Decision(policy=CastPolicy.FP32, precision=TF32)}, scope="net/head"
).with_rules({"conv_general_dilated": "FP32"})


@pytest.mark.parametrize(
    ("policy", "head", "pinned", "image"),
    [
        (BF16, (LOW, None), None, (LOW, None)),
        (BF16.with_rules({"*": "highest"}), (LOW, None), HIGHEST, (LOW, None)),
        (RULED, (FULL, TF32), None, (FULL, None)),
        (RULED.with_rules({"*": "highest"}), (FULL, TF32), HIGHEST, (FULL, HIGHEST)),
        (RULED.with_rules({"*": TF32}), (FULL, TF32), TF32, (FULL, None)),
        (
            BF16.with_rules({"*": "float32"}, scope="*/head").with_rules(
                {"*": "high"}, scope="*/head"
            ),
            (FULL, HIGH),
            None,
            (LOW, None),
        ),
    ],
)
def test_what_stays_float32_runs_in_the_precision_of_its_scope(policy, head, pinned, image):
    low = LOW, None
    assert precisions(policy) == [low, head, (FULL, pinned), (FULL, HIGH), image]


def test_explain_shows_it_and_the_backward_pass_has_it():
    policy = BF16.with_rules({"dot_general": "FP32"}).with_rules({"*": "highest"})
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w)
    causes = [r.cause for r in explain(loss, X, X, policy=policy).rows if "dot" in r.primitive]
    assert causes == ["precision highest"] * 2
    dots = find(trace(jax.grad(autocast(loss, policy=policy)), X, X), "dot_general")
    assert len(dots) == 5
    assert all(eqn.params["precision"] == HIGHEST for eqn in dots)
    report = explain(loss, X, X, policy=policy.with_rules({"*": "high"}, scope="*/misspelt"))
    assert report.totals.unmatched_scopes == ("*/misspelt",)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BF16.with_rules({"*": "higest"}), ValueError, "Did you mean 'highest'"),
        (lambda: BF16.with_rules({"*": "f16_f16_f16"}), ValueError, "or a precision"),
        (lambda: BF16.with_rules({"*": TF16}), ValueError, "must be one of 'default'"),
        (lambda: Decision(emit=jnp.dot, precision="high"), ValueError, "belongs to policy="),
    ],
)
def test_wrong_precisions_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


LOWER = {"dot_general": "LOWER_PRECISION_FP"}
OVERRULING = {
    "a rule": BF16.with_rules(LOWER),
    "a scope": BF16.with_rules({"*": "bfloat16"}, scope="low"),
    "rounded gradients": Policy(jnp.bfloat16, level="by_hand").with_rules(LOWER),
}


@pytest.mark.parametrize("asked", ["high", "highest", "BF16_BF16_F32_X3", ("highest", "default")])
@pytest.mark.parametrize("made", [lambda a: a, jnp.sin], ids=["sources", "computed"])
@pytest.mark.parametrize("policy", OVERRULING.values(), ids=OVERRULING)
def test_an_overruled_precision_is_asked_of_no_product(policy, made, asked):
    def loss(w, x):
        with jax.named_scope("low"):
            return jnp.sum(jnp.exp(jnp.matmul(made(x), made(w), precision=asked)))

    gradient = jax.grad(autocast(loss, policy=policy), argnums=(0, 1))
    dots = find(trace(gradient, X, X), "dot_general")
    assert len(dots) == 3
    for eqn in dots:
        assert {v.aval.dtype.name for v in eqn.invars[:2]} == {LOW}
        assert re.search("high|x3|preset", str(eqn.params), re.IGNORECASE) is None
