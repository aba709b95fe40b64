"""Numbers that a function closes over as arrays of no dimension, which are no literals."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import Policy, autocast
from jmp_autocast.interpreters.plan.constant_range import constant_range
from tests.support.numerics import relative_error
from tests.support.plans import FULL

X = np.random.default_rng(0).standard_normal((4, 3), np.float32)
W = np.random.default_rng(1).standard_normal((3, 3), np.float32)

OPERATIONS = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "maximum": jnp.maximum,
    "where": lambda y, number: jnp.where(y > 0, y, number),
}


@pytest.mark.parametrize("level", ["o1", "compute"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("number", [0.5, -0.0, 3.0, 700.0, -700.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_number_closed_over_is_a_constant_of_one_element(name, number, dtype, level):
    constant = jnp.asarray(number, jnp.float32)

    def fn(w, x):
        y = x @ w
        # Divided by 0 it would be infinite in float32, too.
        return OPERATIONS[name](y, constant if number or name != "divide" else constant + 1)

    mixed = autocast(fn, policy=Policy(dtype, level=level))
    assert constant.shape == ()
    assert relative_error(mixed(W, X), fn(W, X)) < 2e-2
    gradients = (jax.grad(lambda w, f=f: jnp.sum(f(w, X)))(W) for f in (mixed, fn))
    assert relative_error(*gradients) < 2e-2


@pytest.mark.parametrize("number", [0.5, 3.0, 700.0, 1e5, -1e5, np.inf, np.nan])
def test_a_number_has_the_range_of_an_array_that_holds_it(number):
    found, expected = (constant_range(np.full(s, number, np.float32), FULL) for s in ((), (1,)))
    assert found == expected
