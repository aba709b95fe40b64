"""The passes before planning: a jaxpr in, a jaxpr out, of the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, explain, full_precision
from jmp_autocast.interpreters.before import Preparation
from jmp_autocast.interpreters.compat import jaxpr_as_fun
from jmp_autocast.interpreters.primitives.structure import bodies, equations_in
from jmp_autocast.interpreters.regions import Regions

X = jnp.linspace(-4.0, 4.0, 32).reshape(4, 8)
W = jax.random.normal(jax.random.key(0), (8, 8))
LABELS = jnp.array([3, 0, 7, 2])
MASK = (X > 0).astype(jnp.int8)


def prepared(fn, *args, policy=BF16):
    with jax.numpy_dtype_promotion("standard"):
        traced = jax.make_jaxpr(fn)(*args)
    prepare = Preparation(Regions(policy, marks_only=True))
    return traced, prepare(traced)


def names(jaxpr):
    return [eqn.primitive.name for eqn, _ in equations_in(jaxpr)]


def picked(x, labels):
    return jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)


def scanned(fn):
    return lambda *args: lax.scan(lambda c, _: (c, fn(*args)), 0, length=2)[1]


def with_a_rule(fn):
    f = jax.custom_vjp(fn)
    f.defvjp(lambda *args: (fn(*args), args), lambda args, _: tuple(map(jnp.zeros_like, args)))
    return f


FUNCTIONS = {
    "number": (lambda x, w: MASK @ w + x, "convert_element_type"),
    "pick": (lambda x, w: picked(x @ w, LABELS), "jit"),
}
AROUND = {
    "inline": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": scanned,
    "cond": lambda fn: lambda x, w: lax.cond(x[0, 0] < 0, fn, lambda x, w: fn(x, 2 * w), x, w),
    "while": lambda fn: lambda x, w: lax.fori_loop(0, 2, lambda i, y: y + fn(x, w), fn(x, w)),
    "custom_vjp": with_a_rule,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_the_program(name, around):
    fn, primitive = FUNCTIONS[name]
    traced, now = prepared(AROUND[around](fn), X, W)
    twice = 2 if around in ("cond", "while") else 1
    if name == "pick":  # the call around the whole program stays
        assert names(now).count("jit") == (around == "jit")
    else:
        assert names(now).count(primitive) - names(traced).count(primitive) == twice
    assert now.in_avals == traced.in_avals
    assert now.out_avals == traced.out_avals
    for found, expected in zip(jaxpr_as_fun(now)(X, W), jaxpr_as_fun(traced)(X, W), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_where_nothing_is_lowered_the_program_is_the_same_object(name):
    def fn(x, w):
        with full_precision():
            return FUNCTIONS[name][0](x, w)

    for each in (fn, jax.jit(fn), scanned(fn)):
        traced, now = prepared(each, X, W)
        assert now is traced


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x @ w,
        lambda x, w: jnp.matmul(MASK, MASK.T, preferred_element_type=jnp.float32),
        lambda x, w: jnp.matmul(MASK, w, preferred_element_type=jnp.int32),
        jax.jit(lambda x, w: jax.jit(jnp.tanh)(x @ w)),
    ],
)
def test_other_programs_are_the_same_object(fn):
    traced, now = prepared(fn, X, W)
    assert now is traced


def test_a_layer_that_is_called_often_is_prepared_once():
    layer = jax.jit(lambda x, w: (MASK @ w) * picked(x @ w, LABELS))

    def model(x, w):
        for _ in range(5):
            x = layer(x, w)
        return x

    traced, now = prepared(model, X, W)
    assert len({id(bodies(eqn)[0].jaxpr) for eqn in traced.eqns}) == 1
    assert len({id(bodies(eqn)[0].jaxpr) for eqn in now.eqns}) == 1
    assert names(now).count("convert_element_type") == 5


def test_a_number_is_cast_once_for_all_its_products():
    _, now = prepared(lambda x, w: (MASK @ w, MASK @ (2 * w)), X, W)
    assert names(now).count("convert_element_type") == 1


def test_a_function_of_the_users_sees_the_product_as_it_is_written():
    policy = BF16.with_rules({"dot_general": lambda eqn: None})
    traced, now = prepared(FUNCTIONS["number"][0], X, W, policy=policy)
    assert now is traced


def test_calls_that_only_hold_picks_stay():
    layer = jax.jit(lambda x, w: picked(x @ w, LABELS))
    _, now = prepared(lambda x, w: layer(x, w) + layer(2 * x, w), X, W)
    assert [eqn.primitive.name for eqn in now.eqns].count("jit") == 2
    assert names(now).count("jit") == 2  # what is in them is inline


def test_what_is_picked_in_a_call_and_made_in_another_is_in_one_jaxpr():
    make, take = jax.jit(lambda x: x - 1.0), jax.jit(lambda x, y: x[jnp.arange(4), y])
    traced, now = prepared(lambda x, w: (take(make(x @ w), LABELS), make(x)), X, W)
    # The second call of `make` has nothing to do with picked elements.
    assert names(now).count("jit") == 1
    for found, expected in zip(jaxpr_as_fun(now)(X, W), jaxpr_as_fun(traced)(X, W), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_same_call_is_inlined_twice():
    make = jax.jit(lambda x: jnp.tanh(x) - 1.0)

    def fn(x, w):
        one, two = make(x @ w), make(2 * x)
        return one[jnp.arange(4), LABELS] + two[jnp.arange(4), LABELS]

    traced, now = prepared(fn, X, W)
    assert "jit" not in names(now)
    found, expected = jaxpr_as_fun(now)(X, W)[0], jaxpr_as_fun(traced)(X, W)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=3e-7)


def test_explain_names_the_line_of_what_was_put_in():
    def count(x, w):
        with jax.named_scope("count"):
            return lax.dot_general(MASK, w, (((1,), (0,)), ((), ())), None, jnp.float32)

    (row,) = [r for r in explain(count, X, W, policy=BF16).rows if r.reason == "USER_CAST"]
    assert row.scope == "count"
    assert __file__.split("/")[-1] in row.source
