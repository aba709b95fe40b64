"""Rules of the user's own that close over values of the function around them.

Implicit differentiation does so. JAX allows it where the function is not jitted itself; autocast
traces it, so that the rule holds a tracer of a trace that is over.

The rules here are wrong on purpose, by a factor of three, so that one that was lost would show.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast
from tests.support.jaxprs import assert_dots_run_in
from tests.support.numerics import assert_trees_close

CAST = functools.partial(autocast, policy=jnp.bfloat16)
DECLARED = functools.partial(autocast, policy=BF16.with_rules({"*": "float32"}))

# A rule that closes over tracers is what JAX's check of leaks looks for.
pytestmark = pytest.mark.usefixtures("jit_caches")


def w():
    return np.random.default_rng(0).standard_normal((8, 8), np.float32) / 4


def x():
    return np.random.default_rng(1).standard_normal(8, np.float32)


def fixed_point(w, x):
    """The solution of y = tanh(y @ w) / 2 + x, differentiated implicitly."""

    @jax.custom_vjp
    def solve(x):
        return lax.fori_loop(0, 20, lambda _, y: step(w, y, x), x)

    def step(w, y, x):
        return jnp.tanh(y @ w) / 2 + x

    def backward(saved, g):
        y, x = saved
        pull = jax.vjp(lambda y: step(w, y, x), y)[1]
        return (3 * lax.fori_loop(0, 20, lambda _, v: g + pull(v)[0], g),)

    solve.defvjp(lambda x: (y := solve(x), (y, x)), backward)
    return jnp.sum(solve(x @ w) ** 2)


def jvp_rule(w, x):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x @ w)

    @f.defjvp
    def _(primals, tangents):
        return f(*primals), 3 * jnp.cos(primals[0] @ w) * (tangents[0] @ w)

    return jnp.sum(f(x) ** 2)


def only_the_rule(w, x):
    """What the rule closes over is computed, and read by nothing else; its function is a product
    of elements, in which nothing is lowered."""
    product = jnp.tanh(w @ w)

    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (double(x), None), lambda _, g: (3 * (g @ product),))
    return jnp.sum(double(x) ** 2)


def in_a_loop(w, x):
    @jax.custom_vjp
    def f(h):
        return jnp.sin(h @ w)

    f.defvjp(lambda h: (f(h), h), lambda h, g: (3 * (g * jnp.cos(h @ w)) @ w.T,))
    return jnp.sum(lax.scan(lambda h, _: (f(h), None), x, None, length=2)[0] ** 2)


FUNCTIONS = {f.__name__: f for f in (fixed_point, jvp_rule, only_the_rule, in_a_loop)}
EACH = pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)


def grad(fn, w, x):
    return jax.grad(fn, 1)(w, x)


def mapped(fn, w, x):
    return jax.vmap(jax.grad(fn, 1), (0, None))(jnp.stack([w, w / 2]), x)


def in_a_scan(fn, w, x):
    step = lambda x, w: (x - jax.grad(fn, 1)(w, x) / 50, None)
    return lax.scan(step, x, jnp.stack([w, w / 2]))[0]


def twice(fn, w, x):
    return jax.grad(lambda x: jnp.sum(jax.grad(fn, 1)(w, x) ** 2))(x)


@EACH
def test_the_rule_is_rewritten(fn):
    found = jax.make_jaxpr(lambda w, x: grad(CAST(fn), w, x))(w(), x())
    assert [a.dtype for a in found.out_avals] == [jnp.float32]
    assert_dots_run_in("bfloat16", found.jaxpr)
    assert_trees_close(grad(CAST(fn), w(), x()), grad(fn, w(), x()), 3e-2)
    if fn is not in_a_loop:
        assert_trees_close(
            jax.jit(functools.partial(grad, CAST(fn)))(w(), x()), grad(fn, w(), x()), 3e-2
        )


@pytest.mark.parametrize("cast", [lambda fn: fn, CAST])
def test_fails_as_without_autocast(cast):
    """There is no value that the rule could be given: the trace of the `jit` is over, too."""
    with pytest.raises(TypeError, match="DynamicJaxprTracer"):
        jax.grad(jax.jit(cast(fixed_point)), 1)(w(), x())
    with pytest.raises(TypeError, match="DynamicJaxprTracer"):
        jax.jit(jax.grad(cast(in_a_loop), 1))(w(), x())


@pytest.mark.parametrize("transform", [mapped, in_a_scan, twice])
@pytest.mark.parametrize(
    ("fn", "cast"),
    [(jvp_rule, CAST), (only_the_rule, lambda fn: CAST(CAST(fn))), (only_the_rule, DECLARED)],
    ids=["bfloat16", "nested", "nothing lowered"],
)
def test_under_other_transformations(fn, cast, transform):
    tolerance = 1e-6 if cast is DECLARED else 5e-2
    assert_trees_close(transform(cast(fn), w(), x()), transform(fn, w(), x()), tolerance)


def test_two_backward_passes_of_one_call():
    """The second one finds no tracer of the first."""
    pull = jax.vjp(functools.partial(CAST(only_the_rule), w()), x())[1]
    first, second = jax.jit(pull)(1.0), pull(2.0)
    assert_trees_close(2 * first[0], second[0], 1e-2)


@pytest.mark.parametrize("cast", [lambda fn: fn, CAST])
def test_what_a_rule_closes_over_has_no_gradient(cast):
    """JAX refuses it; which of its errors it raises depends on how the rule was reached."""
    with pytest.raises(Exception, match=r"unexpected tracer|closed-over value"):
        jax.grad(cast(fixed_point), (0, 1))(w(), x())


def scaled_by(backward):
    """A function whose rule is a product by what ``backward`` makes of the weight."""

    def fn(w, x):
        @jax.custom_vjp
        def double(x):
            return 2 * x

        double.defvjp(lambda x: (double(x), None), backward(jnp.tanh(w @ w)))
        return jnp.sum(double(x @ w) ** 2)

    return fn


class Model(NamedTuple):
    weight: Any

    def backward(self, _, g):
        return (3 * (g @ self.weight),)


def kept_in_a_list(w):
    kept = {"layers": [{"w": w}]}
    return lambda _, g: (3 * (g @ kept["layers"][0]["w"]),)


def decorated(w):
    backward = lambda _, g: (3 * (g @ w),)
    return functools.wraps(backward)(lambda *args: backward(*args))


def default(w):
    return lambda _, g, w=w: (3 * (g @ w),)


def keyword_default(w):
    return lambda _, g, *, w=w: (3 * (g @ w),)


def beside_what_has_no_order(w):
    names = {1: "one", "two": 2}
    return lambda _, g: (names[1] and 3 * (g @ w),)


FORMS = {
    "partial": lambda w: functools.partial(lambda w, _, g: (3 * (g @ w),), w),
    "method": lambda w: Model(w).backward,
    **{f.__name__: f for f in (kept_in_a_list, decorated, default, keyword_default)},
    beside_what_has_no_order.__name__: beside_what_has_no_order,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_a_rule_holds_itself(form):
    fn = scaled_by(form)
    assert_trees_close(grad(CAST(fn), w(), x()), grad(fn, w(), x()), 3e-2)
