"""Which sources have a vote beside a 16-bit value: factors, differences, and what is made of two.

Sums are in `test_planner.py`.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast.interpreters import Source
from tests.support.plans import FULL, LOW, all_equations, low, plan_of, planned

DATA, PARAM = Source.DATA, Source.PARAM
X = np.ones((4, 4), np.float32)
ROW = np.ones(4, np.float32)
COLUMN = np.ones((4, 1), np.float32)

FACTORS = {
    "data": (jnp.multiply, X, DATA, FULL),
    "parameter": (jnp.multiply, X, PARAM, LOW),
    "row of data": (jnp.multiply, ROW, DATA, LOW),
    "column of data": (jnp.multiply, COLUMN, DATA, LOW),
    "number": (jnp.multiply, np.float32(3), DATA, LOW),
    "row and column": (lambda h, x: h[:1] * x, COLUMN, DATA, LOW),
    "repeated row": (lambda h, x: h * jnp.broadcast_to(x, (4, 4)), ROW, DATA, FULL),
    "moved data": (lambda h, x: h * x.T, X, DATA, FULL),
    "row of a parameter": (jnp.multiply, ROW, PARAM, LOW),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_votes_where_it_is_data_of_full_size(name):
    fn, other, leaf, expected = FACTORS[name]
    plan = plan_of(low(fn), X, other, leaves=(DATA, leaf))
    assert planned(plan, "mul").results[0].dtype == expected


DIFFERENCES = {
    "beside a product": (jnp.subtract, LOW),
    "beside an activation": (lambda h, x: lax.tanh(h) - x, FULL),
    "from a parameter": (lambda h, x: x - lax.tanh(h), FULL),
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
