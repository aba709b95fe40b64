"""Equations that call one custom function share its rule; any other rule stays its own."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, autocast
from jmp_autocast.interpreters.primitives.structure import called, has_rule, rule_of
from tests.support.jaxprs import trace

X = jnp.linspace(-1.0, 1.0, 24).reshape(3, 8)
W = jnp.eye(8) + 0.125


def custom_jvp(slope, calls=()):
    """A function that returns its argument, and whose rule says that its slope is another."""

    @jax.custom_jvp
    def function(x):
        return x * 1.0

    @function.defjvp
    def rule(primals, tangents):
        for counter in calls:
            counter.append(1)
        return function(*primals), tangents[0] * slope

    return function


def custom_vjp(slope, calls=()):
    """`custom_jvp`, by a rule for reverse mode."""

    @jax.custom_vjp
    def function(x):
        return x * 1.0

    def forward(x):
        for counter in calls:
            counter.append(1)
        return function(x), None

    function.defvjp(forward, lambda _, g: (g * slope,))
    return function


KINDS = {"custom_jvp": custom_jvp, "custom_vjp": custom_vjp}
# After a product the function runs in 16 bits and is rebuilt; before one it stays as it is.
PLACES = {"rebuilt": lambda f, x: f(x @ W), "kept": lambda f, x: f(x) @ W}


def chain(function, place, length):
    def loss(x):
        for _ in range(length):
            x = place(function, x) * 0.5
        return jnp.sum(x)

    return loss


TRANSFORMS = {"grad": jax.grad, "grad of jit": lambda f: jax.grad(jax.jit(f))}


@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_more_calls_run_a_rule_no_more_often(transform, kind, place):
    runs = []
    for length in (4, 9):
        calls = []
        loss = chain(kind(2.0, [calls]), place, length)
        jax.jit(transform(autocast(loss, policy=BF16))).trace(X)
        runs.append(len(calls))
    # The first call and the last one read and return other dtypes.
    assert runs[0] == runs[1] <= 3


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_equal_calls_of_a_forward_pass_hold_one_jaxpr(kind, place):
    eqns = trace(autocast(chain(kind(2.0), place, 6), policy=BF16), X).jaxpr.eqns
    held = [called(e) for e in eqns if has_rule(e)]
    assert len(held) == 6
    # The first call and the last one read and return other dtypes.
    assert len(set(map(id, held))) <= 3


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_functions_that_look_alike_keep_their_rules(kind, place):
    # One code, one body, one shape: the rules differ in what they close over alone.
    functions = [kind(slope) for slope in (2.0, 3.0, 5.0, 0.0)]

    def total(xs):
        return sum(jnp.sum(place(f, x)) for f, x in zip(functions, xs, strict=True))

    loss = autocast(total, policy=BF16)
    slopes = [g[0, 0] / jnp.sum(W[0]) for g in jax.jit(jax.grad(loss))([X] * 4)]
    chex.assert_trees_all_close(slopes, [jnp.float32(s) for s in (2, 3, 5, 0)], rtol=1e-2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled(x, setting):
    return x * 1.0


@scaled.defjvp
def _scaled_jvp(setting, primals, tangents):
    (x,), (t,) = primals, tangents
    return scaled(x, setting), t * (float(setting) + (type(setting) is bool))


@pytest.mark.usefixtures("jit_caches")
def test_a_rule_that_closes_over_a_value_of_the_program_keeps_it():
    def loss(x, factors):
        return sum(jnp.sum(custom_jvp(factor)(x @ W)) for factor in factors)

    factors = [jnp.float32(2.0), jnp.float32(3.0)]
    found = jax.grad(autocast(loss, policy=BF16))(X, factors)
    chex.assert_trees_all_close(found, jax.grad(loss)(X, factors), rtol=1e-2)


FUNCTIONS = jax.nn.relu, jax.nn.relu, jax.nn.relu6, jax.nn.relu6


def rules_in(fn):
    return [rule_of(e)[0] for e in trace(fn, X).jaxpr.eqns if e.primitive.name == "custom_jvp_call"]


def test_calls_of_a_library_function_have_one_rule():
    relu, again, relu6, six = rules_in(lambda x: functools.reduce(lambda x, f: f(x), FUNCTIONS, x))
    assert relu == again != relu6 == six


def test_static_arguments_are_part_of_a_rule():
    # Some are equal to Python; some are equal and change; two sentinels are not even equal.
    values = (1, True, 1.0, 0.0, -0.0, "a", None, {}, {}, object(), object(), [], [], ())
    rules = rules_in(lambda x: [scaled(x, v) for v in values])
    assert len({*rules}) == len(rules)
