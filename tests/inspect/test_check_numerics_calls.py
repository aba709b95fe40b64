"""`check_numerics` has the arguments and the results of the function."""

import gc
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import autocast, check_numerics
from tests.fuzz.program import jax_settings
from tests.fuzz.strategies import cases, examples

X = np.array([1.0, 0.5, 4.0], np.float32)


def wide(x):
    return np.asarray(x).astype(np.complex128)


@examples(8)
@hypothesis.given(cases(size=4, without=["autocast(", "jax.random"]))
def test_results_are_bit_for_bit_those_of_single_equations(case):
    """For programs of nested structures; XLA chooses the order of the sums in a product."""
    sums = ("@", "dot", "einsum", "conv", "linalg", "fft", "mean", "sum", "softmax")
    exact = not any(text in case.program.text() for text in sums)
    with jax_settings(case.program.x64):
        found, report = check_numerics(case.plain, mode="collect")(*case.args)
        with jax.disable_jit():
            one_by_one = case.plain(*case.args)
    for ours, theirs in zip(found, one_by_one, strict=True):
        ours, theirs = wide(ours), wide(theirs)
        finite = np.abs(theirs[np.isfinite(theirs)])
        atol = 0 if exact else 1e-5 * finite.max(initial=0)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
    assert all(row.runs == 1 for row in report.rows if not row.inside)


@examples(15)
@hypothesis.given(cases())
def test_types_are_those_of_the_function(case):
    """Weak types as well."""
    with jax_settings(case.program.x64):
        found = jax.eval_shape(check_numerics(case.plain), *case.args)
        assert found == jax.eval_shape(case.plain, *case.args)


def test_trees_keywords_and_static_leaves():
    def fn(params, *, scale, how, layers=1):
        y = params["w"] * scale
        for _ in range(layers):
            y = {"sin": jnp.sin, "cos": jnp.cos}[how](y)
        return {"y": y, "how": how, "n": layers, "none": None, "i": params["i"]}

    params = {"w": X, "i": np.arange(2, dtype=np.int32)}
    found = check_numerics(fn)(params, scale=jnp.float32(2), how="cos", layers=2)
    assert (found["how"], found["n"], found["none"]) == ("cos", 2, None)
    np.testing.assert_allclose(found["y"], np.cos(np.cos(2 * X)), rtol=1e-5)
    np.testing.assert_array_equal(found["i"], [0, 1])


def test_random_keys_and_effects(capfd):
    def fn(key, x):
        jax.debug.print("total {}", jnp.sum(x))
        # LLVM may fuse the product in a normal number and the sum.
        return jax.random.uniform(key, (3,)) + x, jax.random.split(key)

    key = jax.random.key(3)
    found, keys = check_numerics(fn)(key, X)
    expected, split = fn(key, X)
    jax.effects_barrier()
    np.testing.assert_array_equal(found, expected)
    assert (keys == split).all()
    assert capfd.readouterr().out == "total 5.5\n" * 2


def counting():
    count = []

    def fn(x, scale=1.0):
        count.append(x.shape)
        return jnp.sin(x) * scale

    return fn, count


@pytest.mark.parametrize("mode", ["raise", "collect", "overflow"])
def test_it_is_traced_once_per_signature(mode):
    fn, count = counting()
    checked = check_numerics(fn, mode=mode)
    for _ in range(3):
        checked(X)
        checked(jnp.asarray(X))
    assert len(count) == 1
    checked(X[:2])
    checked(X.astype(np.float16))
    checked(X, 2.0)
    checked(X, scale=2.0)
    assert len(count) == 5
    checked(X, 2.0)
    checked(X[1:])
    assert len(count) == 5


def test_arguments_are_not_kept():
    x = jnp.asarray(X) + 1.0
    alive = weakref.ref(x)
    checked = check_numerics(jnp.sin)
    checked(x)
    del x
    gc.collect()
    assert alive() is None
    checked(X)


def test_closed_over_tracers():
    """Those of the current trace, and none is left behind."""
    box = []
    checked = check_numerics(lambda x: jnp.sum(x * box[0]))

    def outer(y):
        box.append(y)
        total = checked(X)
        box.clear()
        return total

    for _ in range(2):
        np.testing.assert_allclose(jax.jit(outer)(X), np.sum(X * X))
        np.testing.assert_allclose(jax.vmap(outer)(X), np.sum(X) * X)
        np.testing.assert_allclose(jax.jit(outer)(2 * X), 2 * np.sum(X * X))
    with pytest.raises(TypeError, match="is differentiated"):
        jax.grad(outer)(jnp.asarray(X))


def loss(x):
    return jnp.sum(jnp.log(x))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.grad(f)(X),
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.grad(autocast(f, "float16"))(X),
    ],
    ids=["grad", "jvp", "autocast"],
)
def test_it_is_not_differentiated_from_outside(derivative):
    with pytest.raises(TypeError, match=r"Check the gradient: check_numerics\(jax.grad\(loss\)\)"):
        derivative(check_numerics(loss))


def test_it_raises_under_an_outer_jit():
    @jax.jit
    def step(x):
        y = x + 1.0
        return check_numerics(loss)(y - 1.0) * 2.0

    np.testing.assert_allclose(step(X), 2 * np.sum(np.log(X)), rtol=1e-6)
    with pytest.raises(jax.errors.JaxRuntimeError, match="log makes 1 NaN and 1 infinity"):
        jax.block_until_ready(step(X - 1.0))


Y = np.array([1.0, 2.0, 4.0], np.float32)
RUNS = {"eager": lambda f: f, "jit": jax.jit}


def steps(ref, x):
    def step(carry, _):
        ref[0] += carry
        return carry + ref[1], None

    return jax.lax.scan(step, x[0], None, length=3)[0]


def once(ref, x):
    ref[1] += x[0]
    return jnp.sum(ref[...] / x)


@pytest.mark.parametrize("mode", RUNS)
@pytest.mark.parametrize("fn", [once, steps])
def test_a_ref_as_an_argument(fn, mode):
    expected_ref, ref = jax.new_ref(Y), jax.new_ref(Y)
    expected = fn(expected_ref, Y)
    found, report = RUNS[mode](check_numerics(fn, mode="collect"))(ref, Y)
    assert found == expected
    np.testing.assert_array_equal(ref[...], expected_ref[...])
    assert report.first is None


@pytest.mark.parametrize("mode", RUNS)
def test_what_a_ref_brings_is_charged_to_no_equation_and_what_is_made_beside_it_is(mode):
    checked = RUNS[mode](check_numerics(once, mode="collect"))
    result, report = checked(jax.new_ref(np.float32([1, np.nan, 1])), Y)
    assert np.isnan(result)
    assert report.first is None
    _, report = checked(jax.new_ref(Y), np.float32([1, 0, 1]))
    assert report.first.primitive == "div"
