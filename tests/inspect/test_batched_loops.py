"""The tools on loops under `vmap`, whose predicate holds an element for each of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, check_numerics, compare, explain, tune

A = np.float32([1.0, 4.0, 9.0, 100.0])


@jax.vmap
def roots(a):
    """Newton's method: each element ends after another number of steps."""
    return jax.lax.while_loop(
        lambda x: jnp.abs(x * x - a) > 1e-4 * a, lambda x: 0.5 * (x + a / x), a
    )


W = np.float32([[0.5, 0.25], [-0.5, 0.75]])
ROWS = np.float32([[1, 2], [3, 4], [5, 6]])
LENGTHS = np.int32([0, 2, 5])


def recurrent(w, rows, lengths):
    """Rows of different lengths; one carry is a key, which has no elements of its own."""

    def row(x, n):
        def step(state):
            x, i, key = state
            return jnp.tanh(x @ w), i + 1, jax.random.split(key)[0]

        return jax.lax.while_loop(lambda s: s[1] < n, step, (x, 0, jax.random.key(n)))[:2]

    return jax.vmap(row)(rows, lengths)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("fn", "args"), [(roots, (A,)), (recurrent, (W, ROWS, LENGTHS))])
def test_check_numerics_returns_what_each_element_ended_with(fn, args, transform):
    found, report = transform(check_numerics(fn, mode="collect"))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, fn(*args))
    assert report.first is None
    assert max(row.runs for row in report.rows) == (7 if fn is roots else 5)


def test_compare_follows_the_float32_program():
    table = compare(recurrent, W, ROWS, LENGTHS, policy=BF16)
    (dot,) = [row for row in table.rows if row.primitive == "dot_general"]
    assert dot.runs == 5
    assert 0 < dot.error < 2e-2
    assert compare(roots, A, policy=BF16).rows


def test_the_other_tools_read_them():
    assert explain(recurrent, W, ROWS, LENGTHS, policy=BF16).rows
    assert tune(recurrent, [(W, ROWS, LENGTHS)], policy=BF16, tolerance=0.1) is not None


def test_a_nan_of_one_element_is_found():
    @jax.vmap
    def decreasing(x):
        return jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.log(s[0]), s[1] + 1), (x, 0))

    message = r"log makes 1 NaN among 6 values[^!]*first in run 2 of 3"
    with pytest.raises(FloatingPointError, match=message):
        check_numerics(decreasing)(np.float32([1e30, 2.0]))
