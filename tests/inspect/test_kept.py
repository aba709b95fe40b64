"""What `explain` says is kept for the backward pass, by dtype, primitive and scope."""

import json

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, autocast, explain, keep_less
from tests.keep.programs import LAYERS, ROWS, WEIGHTS, X, scanned, small
from tests.keep.test_segments import kept_nbytes

pytestmark = pytest.mark.usefixtures("jit_caches")


@pytest.mark.parametrize("residuals", ["declared", "auto", "recompute"])
def test_the_bytes_are_those_that_jax_keeps(residuals):
    mixed = keep_less(autocast(scanned, policy=BF16), residuals=residuals)
    report = explain(mixed, WEIGHTS, X)
    assert sum(row.nbytes for row in report.kept) == report.totals.residual_nbytes
    assert report.totals.residual_nbytes == kept_nbytes(mixed)
    sizes = [row.nbytes for row in report.kept]
    assert sizes == sorted(sizes, reverse=True)
    assert json.loads(report.to_json())["kept"][0]["nbytes"] == sizes[0]


def test_what_keeps_less_is_seen():
    def keeps(fn):
        return explain(autocast(fn, policy=BF16), WEIGHTS, X)

    plain, less = keeps(scanned), keeps(keep_less(scanned))
    assert less.totals.residual_nbytes < 0.6 * plain.totals.residual_nbytes
    assert {"exp", "rsqrt"} <= {row.primitive for row in plain.kept}
    assert {"exp", "rsqrt", "name"}.isdisjoint(row.primitive for row in less.kept)


def test_what_is_made_in_a_loop_has_its_maker_there():
    rows = explain(scanned, WEIGHTS, X, policy=BF16).kept
    dots = [row for row in rows if row.primitive == "dot_general"]
    widest = 2 * LAYERS * ROWS * 32  # the bytes of the GELU's operand, in bfloat16
    assert {row.dtype for row in dots} == {"bfloat16"}
    assert sum(row.nbytes for row in dots) >= widest
    assert "scan" not in {row.primitive for row in rows}


def test_equal_layers_are_one_row():
    def loss(w, x):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"), jax.named_scope("mlp"):
                x = jnp.sin(x @ w)
        return x @ w

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    report = explain(loss, x, x, policy=BF16)
    row = next(row for row in report.kept if row.primitive == "cos")
    assert (row.scope, row.arrays, row.nbytes) == ("layer_*/mlp", 3, 3 * 2 * 64)
    lines = str(report).splitlines()
    head = next(i for i, line in enumerate(lines) if "kept, made by" in line)
    assert lines[head + 1].split() == ["384", "3", "bfloat16", "cos", "layer_*/mlp"]
    assert all(len(line) <= 100 for line in lines)


def test_a_gradient_and_what_has_no_derivative_keep_nothing_for_another_one():
    def loss(w, x):
        return jax.lax.while_loop(lambda x: x.sum() < 9.0, lambda x: x + 1.0, small(w, x))

    for fn in (jax.grad(scanned), loss):
        report = explain(fn, WEIGHTS, X, policy=BF16)
        assert report.kept == ()
        assert report.totals.residual_nbytes is None
        assert "kept, made by" not in str(report)


def test_a_program_that_holds_autocast_has_the_same_table():
    mixed = autocast(scanned, policy=BF16)
    assert explain(jax.jit(mixed), WEIGHTS, X).kept == explain(mixed, WEIGHTS, X).kept


def test_a_token_is_an_argument_and_a_result():
    take = lambda w, x, token: (jnp.sin(x @ w), jax.lax.create_token(x))
    w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
    found = []

    @jax.jit
    def traced(token):
        found.append(explain(take, w, x, token, policy=BF16))
        return 0

    traced(jax.lax.create_token(None))
    plain = explain(lambda w, x: jnp.sin(x @ w), w, x, policy=BF16)
    assert found[0].totals.residual_nbytes == plain.totals.residual_nbytes > 0
    assert found[0].totals.residual_error == ""
