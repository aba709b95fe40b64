"""`explain` for programs with autocast inside, and for those with nothing to lower."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, autocast, compare, explain, tune
from tests.support.jaxprs import named

W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
X = np.ones((4, 8), np.float32)
P = {"w": W, "b": np.ones(8, np.float32)}


def loss(p, x):
    with jax.named_scope("layer"):
        h = jax.nn.relu(x @ p["w"] + p["b"])
    with jax.named_scope("head"):
        return jnp.mean(jax.nn.log_softmax(h @ p["w"]) ** 2)


mixed = autocast(loss, policy=BF16)


def step(p, x):
    gradient = jax.grad(mixed)(p, x)
    return jax.tree.map(lambda a, b: a - jnp.float32(0.1) * b, p, gradient)


PROGRAMS = {"jit": jax.jit(mixed), "gradient": jax.grad(mixed), "step": jax.jit(step)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_runs_is_reported(name):
    report = explain(PROGRAMS[name], P, X)
    assert report.compute_dtype == "bfloat16"
    assert report.totals.low_share == 1
    assert report.totals.cast_parameters == 2
    dots = [row for row in report.rows if row.primitive == "dot_general"]
    assert len(dots) == len(named(jax.make_jaxpr(PROGRAMS[name])(P, X), "dot_general"))
    assert {row.operands for row in dots} == {("bfloat16",) * 2}
    assert {row.reason for row in dots} == {"LOWER_PRECISION"}
    assert {row.scope for row in dots} == {"layer", "head"}
    exp = next(row for row in report.rows if row.primitive == "exp")
    assert (exp.operands, exp.reason) == (("float32",), "FP32")


def test_what_stands_outside_of_autocast_is_named():
    rows = explain(PROGRAMS["step"], P, X).rows
    outside = [row for row in rows if row.cause == "outside of autocast" and row.flops]
    assert [row.primitive for row in outside] == ["mul", "sub"] * 2
    assert {row.operands[0] for row in outside} == {"float32"}


def test_a_report_leaves_no_name_in_a_program_that_runs():
    run = jax.jit(mixed)
    explain(run, P, X)
    text = run.trace(P, X).jaxpr.pretty_print(name_stack=True)
    assert "layer" in text
    assert "because" not in text


def test_a_policy_is_for_what_no_autocast_governs():
    def half(p, x):
        return mixed(p, x) + jnp.sum(x @ p["w"])

    rows = explain(half, P, X, policy="float16").rows
    dots = [row.operands[0] for row in rows if row.primitive == "dot_general"]
    assert dots == ["bfloat16", "bfloat16", "float16"]


def test_a_float64_program_is_not_in_bfloat16():
    with jax.enable_x64(True):
        report = explain(jnp.matmul, jnp.ones((4, 4)), jnp.ones((4, 4)), policy=BF16)
    assert report.rows[0].operands == ("float64", "float64")
    assert report.totals.low_share == 0
    assert "0.0 % of matmul" in report.summary


def test_tools_take_a_dtype_for_a_policy():
    f = lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"]
    for policy in ("bfloat16", jnp.bfloat16, BF16):
        rows = explain(f, P, X, policy=policy).rows
        assert [row.results for row in rows] == [row.results for row in explain(f, P, X).rows]
        assert compare(f, P, X, policy=policy).compute_dtype == "bfloat16"
        assert tune(f, P, X, tolerance=0.5, policy=policy).policy == BF16
    with pytest.raises(ValueError, match="Leave policy out"):
        explain(mixed, P, X, policy=BF16)
