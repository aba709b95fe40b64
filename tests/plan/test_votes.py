"""Which sources have a vote beside a 16-bit value: summands, factors, what is made of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, explain
from jmp_autocast.interpreters import Source
from tests.support.plans import FULL, LOW, all_equations, low, plan_of, planned

DATA, PARAM = Source.DATA, Source.PARAM
X = np.ones((8, 8), np.float32)
ROW = np.ones(8, np.float32)
COLUMN = np.ones((8, 1), np.float32)
MASK = np.ones((8, 8), bool)
IDS = np.ones((8, 8), np.int32)


VOTES = {
    "data_of_full_size": (jnp.add, X, DATA, FULL),
    "data_row": (jnp.add, ROW, DATA, FULL),
    "data_column": (jnp.add, COLUMN, DATA, FULL),
    "data_column_and_a_row": (lambda h, x: h[:1] + x, COLUMN, DATA, FULL),
    "data_scalar": (jnp.add, np.float32(1), DATA, FULL),
    "parameter_of_full_size": (jnp.add, X, PARAM, FULL),
    "parameter_row": (jnp.add, ROW, PARAM, LOW),
    "moved_data": (lambda h, x: h + x.T, X, DATA, FULL),
    "made_of_data": (lambda h, x: h + jnp.sin(x), X, DATA, FULL),
    "made_of_a_parameter": (lambda h, x: h + jnp.sin(x), X, PARAM, FULL),
    "computed_in_float32": (lambda h, x: h + jnp.exp(x), ROW, PARAM, FULL),
    "reduced_in_float32": (lambda h, x: h + x.sum(0), X, PARAM, FULL),
    "rows_of_an_embedding": (lambda h, x: h + x[np.array([3, 1, 0, 0] * 2)], X, PARAM, FULL),
    "broadcast_parameter": (lambda h, x: h + jnp.broadcast_to(x, (8, 8)), ROW, PARAM, LOW),
    "parameter_through_jit": (lambda h, x: h + jax.jit(jnp.sin)(x), X, PARAM, FULL),
    "parameter_behind_a_barrier": (lambda h, x: h + lax.optimization_barrier(x), X, PARAM, FULL),
    "bools": (lambda h, m: h + m.astype(jnp.float32), MASK, DATA, LOW),
    "bytes": (lambda h, m: h + m.astype(jnp.float32), IDS.astype(np.uint8), DATA, LOW),
    "integers": (lambda h, m: h + m.astype(jnp.float32), IDS, DATA, FULL),
    "comparison": (lambda h, m: h + (m == 1).astype(jnp.float32), IDS, DATA, LOW),
    "row_of_integers": (lambda h, m: h + m[0].astype(jnp.float32), IDS, DATA, FULL),
    "select_with_a_literal": (lambda h, m: h + jnp.where(m, h, 0.0), MASK, DATA, LOW),
    "select_of_literals": (lambda h, m: h + jnp.where(m, 1.0, 0.0), MASK, DATA, LOW),
    "constant": (lambda h, x: h + X, X, DATA, LOW),
    "large_constant": (lambda h, x: h + 300 * X, X, DATA, FULL),
    "row_of_constants_beside_a_product": (lambda h, x: h + 300 * ROW, X, DATA, LOW),
    "row_of_constants_beside_an_activation": (lambda h, x: lax.tanh(h) + 300 * ROW, X, DATA, FULL),
    "bias_of_one_example": (lambda h, x: h[0] + x, ROW, PARAM, LOW),
    "parameter_beside_an_activation": (lambda h, x: lax.tanh(h[0]) + x, ROW, PARAM, FULL),
    "cast_by_the_program": (lambda h, x: h + h.astype(LOW).astype(FULL), X, DATA, FULL),
    "low_rank_update": (lambda h, x: x + h * x[:1, :1], X, PARAM, FULL),
}


@pytest.mark.parametrize(("fn", "other", "leaf", "expected"), VOTES.values(), ids=VOTES)
def test_votes(fn, other, leaf, expected):
    plan = plan_of(low(fn), X, other, leaves=(DATA, leaf))
    assert planned(plan, "add").results[0].dtype == expected


WEAK = {
    "where": lambda h, m: jnp.where(m, h, 0.0),
    "where_first": lambda h, m: jnp.where(m, 0.0, h),
    "through_jit": lambda h, m: jax.jit(lambda s, h: h * s)(2.0, h),
    "twice_through_jit": lambda h, m: jax.jit(lambda s: jax.jit(jnp.multiply)(h, s))(2.0),
    "through_convert": lambda h, m: h * lax.convert_element_type(2.0, jnp.float32),
    "through_broadcast": lambda h, m: h * lax.broadcast(2.0, (8, 8)),
    "full_like": lambda h, m: h + jnp.full_like(h, 3.0),
    "maximum": lambda h, m: jnp.maximum(h, 0.0),
    "clip": lambda h, m: jnp.clip(h, -1.0, 1.0),
    "arithmetic": lambda h, m: h * (1 / jnp.sqrt(jnp.float32(64.0))),
    "pad": lambda h, m: jnp.pad(h, 1),
    "gelu_exact": lambda h, m: jax.nn.gelu(h, approximate=False),
    "where_under_jit": lambda h, m: jax.jit(lambda h: jnp.where(h > 0, h, 0.5))(h),
    "where_of_literals": lambda h, m: jnp.where(m, 1.0, -2.0) * h,
    "zeros": lambda h, m: h + jnp.zeros(()),
    "number": lambda h, m: h * np.float32(0.7),
    "bool": lambda h, m: h * (h > 0).astype(jnp.float32),
    "dropout": lambda h, m: jnp.where(m, h / 0.5, jnp.zeros_like(h)),
}


@pytest.mark.parametrize("fn", WEAK.values(), ids=WEAK)
def test_a_scalar_stays_weak(fn):
    plan = plan_of(low(fn), X, MASK)
    assert plan.outputs[0].dtype == LOW


FACTORS = {
    "data": (jnp.multiply, X, DATA, FULL),
    "parameter": (jnp.multiply, X, PARAM, LOW),
    "row of data": (jnp.multiply, ROW, DATA, LOW),
    "column of data": (jnp.multiply, COLUMN, DATA, LOW),
    "number": (jnp.multiply, np.float32(3), DATA, LOW),
    "row and column": (lambda h, x: h[:1] * x, COLUMN, DATA, LOW),
    "repeated row": (lambda h, x: h * jnp.broadcast_to(x, (8, 8)), ROW, DATA, FULL),
    "moved data": (lambda h, x: h * x.T, X, DATA, FULL),
    "row of a parameter": (jnp.multiply, ROW, PARAM, LOW),
    "rows of an embedding": (lambda h, x: h * x[np.array([3, 1, 0, 0] * 2)], X, PARAM, FULL),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_votes_where_it_is_data_of_full_size(name):
    fn, other, leaf, expected = FACTORS[name]
    plan = plan_of(low(fn), X, other, leaves=(DATA, leaf))
    assert planned(plan, "mul").results[0].dtype == expected


DIFFERENCES = {
    "beside a product": (jnp.subtract, LOW),
    "beside an activation": (lambda h, x: lax.abs(h) - x, FULL),
    "from a parameter": (lambda h, x: x - lax.abs(h), FULL),
    "beside a scaled product": (lambda h, x: 0.5 * h - x, LOW),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_difference_to_a_row_of_parameters_may_be_small(name):
    fn, expected = DIFFERENCES[name]
    plan = plan_of(low(fn), X, ROW, leaves=(DATA, PARAM))
    assert planned(plan, "sub").results[0].dtype == expected


@pytest.mark.parametrize(("leaf", "expected"), [(DATA, FULL), (PARAM, LOW)], ids=["data", "param"])
@pytest.mark.parametrize("first", [False, True], ids=["second", "first"])
def test_what_is_made_of_two_sources_votes_as_the_more_demanding_one(first, leaf, expected):
    """A row of data has no vote beside a weight, but their product is data of full size."""
    scaled = lambda row, w: row * w if first else w * row
    fn = low(lambda h, row, w: jnp.tanh(scaled(row, w) * h))
    plan = plan_of(fn, X, ROW, X, leaves=(DATA, leaf, PARAM))
    of_sources, product = (p for eqn, p in all_equations(plan) if eqn.primitive.name == "mul")
    assert of_sources.results[0].source is leaf
    assert product.results[0].dtype == expected


HALF = {name: np.ones((8, 8), np.float32) for name in ("w", "v")} | {"b": np.ones(8, np.float32)}
# A program, the primitive before the float32 consumer, and its policy.
BEFORE_FLOAT32 = {
    "a far number": (lambda p, x: (2.0 * (x @ p["w"]) + -1000.0) @ p["v"], "mul", BF16),
    "a large number": (lambda p, x: ((x @ p["w"]) ** 2 * 1e8) @ p["v"], "integer_pow", FP16),
    "a weight": (lambda p, x: (p["v"] - 1e-4 * (x @ p["w"])) @ p["v"], "mul", FP16),
    "a row of data": (lambda p, x: (2.0 * (x @ p["w"]) + x[0]) @ p["v"], "mul", BF16),
    "a root beside a product": (
        lambda p, x: jnp.cbrt(q := (h := x @ p["w"]) * h) @ p["v"] + q @ p["v"],
        "mul",
        FP16,
    ),
}


@pytest.mark.parametrize("name", BEFORE_FLOAT32)
def test_what_a_float32_consumer_reads_is_not_rounded_before(name):
    """A step of `1e-4 * gradient` is a subnormal number of float16."""
    fn, primitive, policy = BEFORE_FLOAT32[name]
    rows = explain(fn, HALF, np.ones((8, 8), np.float32), policy=policy).rows
    assert [r.results for r in rows if r.primitive == primitive] == [("float32",)]


def test_a_convolution_that_sums_few_elements_is_rounded_once():
    """It is float32, and so are sums of its results: it starts no residual stream."""

    def summed(p, x):
        of_column = lambda i: jnp.convolve(x[:, i], p["b"][:3], "same")
        return (of_column(0) + of_column(1)) @ p["w"]

    rows = explain(summed, HALF, np.ones((8, 8), np.float32), policy=BF16).rows
    (total,) = [r for r in rows if r.primitive == "add"]
    assert total.operands == ("float32", "float32")
    assert {r.results for r in rows if r.primitive == "squeeze"} == {("float32",)}
