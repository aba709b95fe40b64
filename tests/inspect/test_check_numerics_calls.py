"""`check_numerics` returns what the function returns, and is called as it is."""

import functools
import gc
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jmp_autocast import autocast, check_numerics
from tests.fuzz.program import jax_settings
from tests.fuzz.strategies import cases, examples

X = np.array([1.0, 0.5, 4.0], np.float32)


def wide(x):
    return np.asarray(x).astype(np.complex128)


@examples(8)
@hypothesis.given(cases(size=4, without=["autocast(", "jax.random"]))
def test_results_are_bit_for_bit_those_of_single_equations(case):
    """Of programs that nest structures; XLA chooses the order of the sums in a product."""
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


# --- arguments and results --------------------------------------------------------------------


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


def test_zeros_of_both_signs_and_equal_numbers_of_other_types():
    fn = check_numerics(lambda x, s: x * s)
    assert not np.signbit(fn(X, 0.0)).any()
    assert np.signbit(fn(X, -0.0)).all()
    kinds = check_numerics(lambda x, s: (x, type(s).__name__))
    assert [kinds(X, s)[1] for s in (1, True, 1.0)] == ["int", "bool", "float"]


def test_an_argument_without_a_hash():
    class Options:
        __hash__ = None
        scale = 2.0

    fn = check_numerics(lambda x, o: x * o.scale)
    np.testing.assert_array_equal(fn(X, Options()), 2 * X)


def test_a_method():
    class Model:
        scale = 3.0

        @functools.partial(check_numerics, mode="collect")
        def __call__(self, x):
            return jnp.log(x * self.scale)

    value, report = Model()(X)
    np.testing.assert_allclose(value, np.log(3 * X), rtol=1e-6)
    assert report.name == "__call__"


def test_random_keys_and_effects(capfd):
    def fn(key, x):
        jax.debug.print("total {}", jnp.sum(x))
        # LLVM makes one operation of the product in a normal number and a sum, where it may.
        return jax.random.uniform(key, (3,)) + x, jax.random.split(key)

    key = jax.random.key(3)
    found, keys = check_numerics(fn)(key, X)
    expected, split = fn(key, X)
    jax.effects_barrier()
    np.testing.assert_array_equal(found, expected)
    assert (keys == split).all()
    assert capfd.readouterr().out == "total 5.5\n" * 2


# --- when it traces ---------------------------------------------------------------------------


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


def test_jaxs_settings_belong_to_the_signature():
    def fn(x):
        return x * 2, jnp.arange(3)

    checked = check_numerics(fn)
    assert checked(X)[1].dtype == np.int32
    with jax.enable_x64(True):
        assert checked(X)[1].dtype == np.int64
    assert checked(X)[1].dtype == np.int32


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
    """Each time the ones of that trace, and none is left behind."""
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


# --- inside other transformations -------------------------------------------------------------


def loss(x):
    return jnp.sum(jnp.log(x))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.grad(f)(X),
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.jit(jax.grad(f))(X),
        lambda f: jax.hessian(f)(X),
        lambda f: jax.linearize(f, X),
        lambda f: jax.vmap(jax.grad(f))(X[None]),
        lambda f: jax.grad(autocast(f, compute_dtype="float16"))(X),
    ],
    ids=["grad", "jvp", "jit", "hessian", "linearize", "vmap", "autocast"],
)
def test_it_is_not_differentiated_from_outside(derivative):
    with pytest.raises(TypeError, match=r"Check the gradient: check_numerics\(jax.grad\(loss\)\)"):
        derivative(check_numerics(loss))


def test_what_does_not_depend_on_it_is_differentiated():
    def total(y):
        return jnp.sum(y * y) + check_numerics(loss)(X)

    np.testing.assert_allclose(jax.grad(total)(X), 2 * X)


def test_it_raises_under_an_outer_jit():
    @jax.jit
    def step(x):
        y = x + 1.0
        return check_numerics(loss)(y - 1.0) * 2.0

    np.testing.assert_allclose(step(X), 2 * np.sum(np.log(X)), rtol=1e-6)
    with pytest.raises(jax.errors.JaxRuntimeError, match="log makes 1 NaN and 1 infinity"):
        jax.block_until_ready(step(X - 1.0))


def test_under_an_outer_shard_map():
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = PartitionSpec("devices"), PartitionSpec()

    def mean(x):
        total, report = check_numerics(lambda x: lax.psum(jnp.log(x), "devices"), mode="collect")(x)
        return total, jax.tree.map(lambda leaf: leaf[None], report)

    sharded = jax.shard_map(mean, mesh=mesh, in_specs=rows, out_specs=(everywhere, rows))
    total, report = jax.jit(sharded)(np.arange(8, dtype=np.float32))
    log, psum = report.rows
    assert (log.runs, log.bad_runs, psum.runs, psum.bad_runs) == (8, 1, 8, 0)
    assert np.isneginf(total).all()


def test_a_checked_function_within_a_checked_function():
    inner = check_numerics(jnp.log, mode="collect")
    value, report = check_numerics(lambda x: inner(x)[0] * 2.0, mode="collect")(X - 1.0)
    assert np.isneginf(value[0])
    assert report.first.primitive == "log"


def test_an_autocast_function_and_its_gradient():
    def forward(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    w = np.full((8, 8), 0.1, np.float32)
    low = autocast(forward, compute_dtype="float16")
    for fn in (low, jax.grad(low), jax.value_and_grad(low)):
        found, report = check_numerics(fn, mode="collect")(w, w)
        assert report.first is None
        dots = [row for row in report.rows if row.primitive == "dot_general"]
        assert {row.dtypes for row in dots} <= {("float16",), ("float32",)}
        assert len(dots) >= 2
        expected = jax.jit(fn)(w, w)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=5e-3), found, expected)


# --- equation by equation ---------------------------------------------------------------------


def test_equal_layers_compile_nothing_more(jit_caches, caplog):
    def stacked(layers):
        def fn(w, x):
            for _ in range(layers):
                x = jnp.tanh(x @ w)
            return x

        return fn

    # Of shapes that no other test has, so that nothing is compiled yet.
    w, x = jnp.eye(23) / 2, jnp.ones((21, 23))

    def programs(layers):
        caplog.clear()
        with jax.log_compiles():
            check_numerics(stacked(layers))(w, x)
        compiled = [r.message for r in caplog.records if "Finished XLA compilation" in r.message]
        assert not any("jit(_trace)" in message for message in compiled), "compiled as a whole"
        return len(compiled)

    programs(2)
    # Only what makes readings of all counts at once, whose number is another: less than a program
    # for each layer, where each would have two of its own.
    assert programs(37) < 37
