"""`check_numerics` of functions that read and write refs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import check_numerics

X = np.array([1.0, 2.0, 4.0], np.float32)
MODES = {"eager": lambda f: f, "jit": jax.jit}


def steps(ref, x):
    def step(carry, _):
        ref[0] += carry
        return carry + ref[1], None

    return jax.lax.scan(step, x[0], None, length=3)[0]


def once(ref, x):
    ref[1] += x[0]
    return jnp.sum(ref[...] / x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fn", [once, steps])
def test_a_ref_as_an_argument(fn, mode):
    expected_ref, ref = jax.new_ref(X), jax.new_ref(X)
    expected = fn(expected_ref, X)
    found, report = MODES[mode](check_numerics(fn, mode="collect"))(ref, X)
    assert found == expected
    np.testing.assert_array_equal(ref[...], expected_ref[...])
    assert report.first is None


@pytest.mark.parametrize("mode", MODES)
def test_a_ref_that_the_function_closes_over(mode):
    ref = jax.new_ref(X)

    def fn():
        ref[1] += 1.0
        return ref[...] * 2

    result = MODES[mode](check_numerics(fn))()
    expected = X + np.float32([0, 1, 0])
    np.testing.assert_array_equal(result, 2 * expected)
    np.testing.assert_array_equal(ref[...], expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_that_a_ref_brings_is_charged_to_no_equation(mode):
    ref = jax.new_ref(np.float32([1, np.nan, 1]))
    result, report = MODES[mode](check_numerics(once, mode="collect"))(ref, X)
    assert np.isnan(result)
    assert report.first is None


@pytest.mark.parametrize("mode", MODES)
def test_an_infinity_made_beside_a_ref_is_found(mode):
    ref = jax.new_ref(X)
    _, report = MODES[mode](check_numerics(once, mode="collect"))(ref, np.float32([1, 0, 1]))
    assert report.first.primitive == "div"


def test_a_checked_function_of_a_ref_is_not_differentiated():
    ref = jax.new_ref(X)
    with pytest.raises(TypeError, match=r"check_numerics\(once\) is differentiated"):
        jax.grad(lambda x: check_numerics(once)(ref, x))(X)
