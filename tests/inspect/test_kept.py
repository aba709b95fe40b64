"""The residuals in a report of `explain`: their bytes, by dtype, primitive and scope."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, CastPolicy, autocast, explain, keep_less
from tests.keep.programs import LAYERS, ROWS, WEIGHTS, X, scanned
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


W = np.ones((8, 8), np.float32)
ROW = np.ones((4, 8), np.float32)
ARRAY = 4 * 8  # elements of an activation


def kept(fn, *args, policy=BF16):
    totals = explain(fn, *args, policy=policy).totals
    return totals.residual_nbytes, totals.float32_residual_nbytes


def dense(params, x):
    return jnp.sum(jnp.sin(x @ params["w"]))


def deep(params, x):
    return jnp.sum(lax.scan(lambda h, w: (jnp.sin(h @ w), None), x @ params["w"], params["ws"])[0])


PARAMS = {"w": W, "ws": np.stack([W] * 3)}


def test_activations_count_and_parameters_do_not():
    # The input in bfloat16, and the cosine in float32, as no product consumes the sine. The cast
    # weight is a parameter.
    assert kept(dense, {"w": W}, ROW) == (2 * ARRAY + 4 * ARRAY, 4 * ARRAY)
    # The cosine alone: the input of the program is in memory anyway.
    pinned = BF16.with_rules({"dot_general": CastPolicy.FP32})
    assert kept(dense, {"w": W}, ROW, policy=pinned) == (4 * ARRAY, 4 * ARRAY)


def test_without_parameters_all_float_inputs_count():
    # The derivative with respect to the input needs the weight: its copy is kept as well.
    assert kept(lambda x, w: jnp.sum(x @ w), ROW, W) == (2 * (ARRAY + 64), 0)


def test_a_loop_keeps_each_iteration():
    # The input and the cosine of each layer; the slices of the stacked weights are parameters.
    # Before the loop the input of the program in bfloat16.
    assert kept(deep, PARAMS, ROW) == ((1 + 2 * 3) * 2 * ARRAY, 0)


def test_a_carry_that_starts_as_a_parameter_is_none():
    square = lambda p: jnp.sum(lax.scan(lambda h, _: (h * h, None), p["w"], None, length=3)[0])
    assert kept(square, {"w": W}) == (3 * 4 * 64, 3 * 4 * 64)


def test_constants_do_not_count():
    assert kept(lambda p, x: jnp.sum(p["w"] * jnp.arange(8.0)), {"w": W}, ROW) == (0, 0)


@jax.custom_vjp
def refuses(x):
    return x


def _forward(x):
    raise RuntimeError("no forward")


refuses.defvjp(_forward, lambda _, g: (g,))


@pytest.mark.parametrize(
    ("fn", "args"),
    {
        "a while loop": (
            lambda p, x: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ p, x),
            (),
        ),
        "a gradient": (jax.grad(lambda w, x: jnp.sum(x @ w)), ()),
        "a rule that raises": (lambda w, x: refuses(x @ w), ()),
        "no float input": (lambda i: jnp.sin(i.astype(np.float32)), (np.arange(3),)),
    }.values(),
)
def test_none_where_there_is_no_backward_pass(fn, args):
    report = explain(fn, *(args or (W, ROW)), policy=BF16)
    assert report.totals.residual_nbytes is report.totals.float32_residual_nbytes is None
    assert report.kept == ()
    assert "kept for the backward pass" not in str(report)


def test_the_text_has_one_line_for_it():
    lines = str(explain(dense, {"w": W}, ROW, policy=BF16)).splitlines()
    assert "residuals   192 B kept for the backward pass, of them 128 B in float32" in lines
