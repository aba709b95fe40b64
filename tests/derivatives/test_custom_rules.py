"""Derivative rules of the user's own stay in force, and are rewritten like everything else.

The rules here are wrong on purpose, by a factor of three, so that one that was lost would show.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast
from tests.support.jaxprs import assert_dots_run_in, find, trace
from tests.support.numerics import assert_trees_close

DTYPES = ["bfloat16", "float16"]
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3}


def w():
    # NumPy: jax.random would be traced again at each call, as leak checks switch caches off.
    return np.random.default_rng(0).standard_normal((8, 8), np.float32) / 3


def x():
    return np.random.default_rng(1).standard_normal((6, 8), np.float32)


def check(fn, *args, dtype="float16", rounds=1):
    """Types, dots and values of a function that contains derivatives; returns its values.

    ``fn`` takes autocast, or something that does nothing in its place. ``rounds`` is how often
    rounding errors add up.
    """
    half = fn(functools.partial(autocast, policy=dtype))
    found, plain = jax.jit(half).trace(*args), jax.jit(fn(lambda f: f)).trace(*args)
    assert found.out_info == plain.out_info
    assert_dots_run_in(dtype, found.jaxpr)
    # Most of the time of these tests is LLVM's, and float16 takes it less.
    options = {"xla_backend_optimization_level": 0}
    result = found.lower().compile(options)(*args)
    assert_trees_close(result, plain.lower().compile(options)(*args), rounds * TOLERANCE[dtype])
    return result


@jax.custom_jvp
def sin_dot_jvp(x, w):
    return jnp.sin(x @ w)


@sin_dot_jvp.defjvp
def _(primals, tangents):
    (x, w), (tx, tw) = primals, tangents
    y = x @ w
    return jnp.sin(y), 3 * jnp.cos(y) * (tx @ w + x @ tw)


@jax.custom_vjp
def sin_dot_vjp(x, w):
    return jnp.sin(x @ w)


def _forward(x, w):
    y = x @ w
    return jnp.sin(y), (x, w, jnp.cos(y))


def _backward(saved, g):
    x, w, cosine = saved
    g = 3 * g * cosine
    return g @ w.T, x.T @ g


sin_dot_vjp.defvjp(_forward, _backward)

RULES = {"custom_jvp": sin_dot_jvp, "custom_vjp": sin_dot_vjp}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def total(f):
    return lambda w, x: jnp.mean(f(x, w) ** 2)


@rules
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_is_in_force(rule, dtype):
    gradient = check(lambda cast: jax.grad(cast(total(rule))), w(), x(), dtype=dtype)
    true = jax.grad(total(lambda x, w: jnp.sin(x @ w)))(w(), x())
    assert_trees_close(gradient, 3 * true, TOLERANCE[dtype])


def _batches(x):
    """Each row eight times: a product that sums less is no faster in 16 bits."""
    return jnp.repeat(x[:, None], 8, 1)


WRAPPINGS = {
    "value_and_grad": lambda f: jax.value_and_grad(f, (0, 1)),
    "vmap_of_grad": lambda f: lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, _batches(x)),
    "grad_of_vmap": lambda f: jax.grad(
        lambda w, x: jnp.sum(jax.vmap(f, (None, 0))(w, _batches(x)))
    ),
    "vmap_over_weights": lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(w[None], x),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "jit": lambda f: jax.grad(jax.jit(f)),
    "cond": lambda f: jax.grad(
        lambda w, x: lax.cond(x[0, 0] > 0, f, lambda w, x: f(2 * w, x), w, x)
    ),
    "jacrev": lambda f: jax.jacrev(lambda w, x: f(w, x)[None] * jnp.arange(2.0)),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS.values(), ids=WRAPPINGS)
@rules
def test_the_rule_under_transforms(rule, wrapping):
    check(lambda cast: wrapping(cast(total(rule))), w(), x(), rounds=2)
    # Around the derivative, autocast meets the rule itself.
    around = trace(autocast(wrapping(total(rule)), "float16"), w(), x())
    assert_dots_run_in("float16", around)


@rules
@pytest.mark.parametrize("remat", [False, True])
def test_the_rule_in_a_loop(rule, remat):
    """The weight is a constant of the loop: its cotangents add up in float32."""

    def loss(w, x):
        step = lambda h, _: (rule(h, w) / 3, None)
        step = jax.checkpoint(step) if remat else step
        return jnp.sum(lax.scan(step, x, None, length=3)[0] ** 2)

    check(lambda cast: jax.grad(cast(loss)), w(), x(), rounds=3)


@rules
def test_second_order(rule):
    """The rule's own derivative: of its forward and of its backward part."""
    check(
        lambda cast: jax.grad(lambda w, x: jnp.sum(jax.grad(cast(total(rule)))(w, x) ** 2)),
        w(),
        x(),
    )


@pytest.mark.parametrize("push", [jax.jvp, lambda f, p, t: jax.linearize(f, *p)[1](*t)])
def test_forward_mode(push):
    directions = np.cos(w()), np.cos(x())
    check(lambda cast: lambda w, x: push(cast(total(sin_dot_jvp)), (w, x), directions), w(), x())


def test_the_rule_sees_declared_dtypes():
    """User code may look at dtypes; what it sees is the float32 program."""
    seen = []

    def backward(saved, g):
        seen.extend(x.dtype for x in (*saved, g))
        return _backward(saved, g)

    f = jax.custom_vjp(sin_dot_vjp.fun)
    f.defvjp(_forward, backward)
    jax.make_jaxpr(jax.grad(autocast(total(f))))(w(), x())
    assert len(seen) >= 4
    assert set(seen) == {np.dtype(np.float32)}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def apply_jvp(f, x, w):
    return f(x @ w)


@apply_jvp.defjvp
def _(f, primals, tangents):
    (x, w), (tx, tw) = primals, tangents
    return f(x @ w), 3 * jnp.cos(x @ w) * (tx @ w + x @ tw)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def apply_vjp(f, x, w, scale):
    return f(x @ w) * scale


apply_vjp.defvjp(
    lambda f, x, w, scale: (f(x @ w) * scale, (x, w)),
    lambda f, scale, saved, g: jax.vjp(lambda x, w: 3 * scale * f(x @ w), *saved)[1](g),
)


@jax.custom_gradient
def by_custom_gradient(x, w):
    y = x @ w
    return jnp.sin(y), lambda g: ((3 * g * jnp.cos(y)) @ w.T, x.T @ (3 * g * jnp.cos(y)))


nested = jax.custom_vjp(lambda x, w: sin_dot_vjp(sin_dot_jvp(x, w), w))
nested.defvjp(lambda x, w: jax.vjp(nested.fun, x, w), lambda pull, g: pull(3 * g))

FORMS = {
    "arguments of a custom_jvp that are not differentiated": lambda x, w: apply_jvp(jnp.sin, x, w),
    "arguments of a custom_vjp": lambda x, w: apply_vjp(jnp.sin, x, w, 0.5),
    "custom_gradient": by_custom_gradient,
    "rules inside rules": nested,
}


@pytest.mark.parametrize("f", FORMS.values(), ids=FORMS)
def test_other_forms_of_rules(f):
    check(lambda cast: jax.grad(cast(total(f))), w(), x())


def test_integer_arguments_none_cotangents_and_integer_outputs():
    @jax.custom_vjp
    def f(x, w, rows):
        y = x[rows] @ w
        return jnp.sin(y), jnp.argmax(y, -1), rows + 1

    def forward(x, w, rows):
        return f(x, w, rows), (x, w, rows)

    def backward(saved, cotangents):
        x, w, rows = saved
        g, of_argmax, of_rows = cotangents
        assert of_argmax.dtype == of_rows.dtype == jax.dtypes.float0
        return None, x[rows].T @ (3 * g * jnp.cos(x[rows] @ w)), None

    f.defvjp(forward, backward)

    def loss(w, x, rows):
        y, best, after = f(x, w, rows)
        return jnp.mean(y**2) + jnp.sum(best + after).astype(jnp.float32), (best, after)

    check(
        lambda cast: jax.value_and_grad(cast(loss), has_aux=True),
        w(),
        x(),
        np.array([2, 0, 5, 1, 4]),
    )


def test_integer_arguments_of_a_custom_jvp():
    @jax.custom_jvp
    def f(x, w, rows):
        return jnp.sin(x[rows] @ w), rows

    @f.defjvp
    def _(primals, tangents):
        (x, w, rows), (tx, tw, t_rows) = primals, tangents
        assert t_rows.dtype == jax.dtypes.float0
        y = x[rows] @ w
        tangent = 3 * jnp.cos(y) * (tx[rows] @ w + x[rows] @ tw)
        return (jnp.sin(y), rows), (tangent, t_rows)

    loss = lambda w, x, rows: jnp.mean(f(x, w, rows)[0] ** 2)
    check(lambda cast: jax.grad(cast(loss)), w(), x(), np.array([2, 0, 5, 1, 4]))


@jax.custom_jvp
def tripled_jvp(x, scale):
    return jnp.sin(x) * scale


@tripled_jvp.defjvp
def _(primals, tangents):
    (x, scale), (tx, _) = primals, tangents
    return tripled_jvp(x, scale), 3 * jnp.cos(x) * scale * tx


@jax.custom_vjp
def tripled_vjp(x, scale):
    return jnp.sin(x) * scale


tripled_vjp.defvjp(
    lambda x, scale: (jnp.sin(x) * scale, (x, scale)),
    lambda kept, c: (3 * c * jnp.cos(kept[0]) * kept[1], jnp.zeros_like(kept[1])),
)


@pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128"])
@pytest.mark.parametrize("function", [tripled_jvp, tripled_vjp])
def test_operands_in_dtypes_that_are_never_cast_have_gradients(function, dtype):
    """They were zero."""
    with jax.enable_x64(True):
        x, scale = np.arange(1, 5).astype(dtype), np.asarray(2, dtype)

        def loss(x, w):
            total = jnp.sum(jnp.real(function(function(x, scale), scale)))
            return total.astype(np.float32) + jnp.sum(w @ w)

        fn = autocast(loss, jnp.bfloat16)
        found, expected = (jax.jit(jax.grad(f)).trace(x, w()) for f in (fn, loss))
        assert found.out_info == expected.out_info
        assert_dots_run_in("bfloat16", trace(fn, x, w()))
        found, expected = (f.lower().compile()(x, w()) for f in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_scalar_integers_of_a_custom_jvp():
    """Their tangents are literals, of a dtype that is no array's."""

    @jax.custom_jvp
    def f(x, w, count):
        return jnp.sin(x @ w), count + 1

    @f.defjvp
    def _(primals, tangents):
        (x, w, count), (tx, tw, t_count) = primals, tangents
        y = x @ w
        return (jnp.sin(y), count + 1), (3 * jnp.cos(y) * (tx @ w + x @ tw), t_count)

    def loss(w, x):
        y, count = f(x, w, jnp.int32(2))
        return jnp.mean(y**2), count

    check(lambda cast: jax.value_and_grad(cast(loss), has_aux=True), w(), x())


def test_optimize_remat():
    f = jax.custom_vjp(lambda x, w: jnp.sin(x @ w))
    f.defvjp(_forward, _backward, optimize_remat=True)
    check(lambda cast: jax.grad(jax.checkpoint(cast(total(f)))), w(), x())
    # Around the derivative, autocast meets the forward rule, and puts what it holds in its place.
    check(lambda cast: cast(jax.value_and_grad(total(f))), w(), x())
    derivative = jax.value_and_grad(total(f))
    assert find(trace(derivative, w(), x()), "remat_opt")
    assert not find(trace(autocast(derivative), w(), x()), "remat_opt")


def test_what_is_declared_16_bit_stays():
    """A gradient has the dtype of its parameter, also a 16-bit one inside a rule."""
    weight = w().astype(jnp.float16)
    f = lambda x, w: sin_dot_vjp(x, w.astype(jnp.float32))
    found = jax.grad(autocast(total(f), jnp.bfloat16))(weight, x())
    assert found.dtype == jnp.float16
    assert_trees_close(found, jax.grad(total(f))(weight, x()), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("inside", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_residuals_are_16_bit(inside):
    """x and w are kept as the one copy that the forward pass has made of each.

    That holds as well where the function of the rule calls another one.
    """
    f = jax.custom_vjp(inside(sin_dot_vjp.fun))
    f.defvjp(_forward, _backward)
    pull = lambda f: jax.eval_shape(lambda x, w: jax.vjp(f, x, w)[1], x(), w())
    dtypes = lambda f: sorted(leaf.dtype.name for leaf in jax.tree.leaves(pull(f)))
    assert dtypes(f) == ["float32"] * 3
    assert dtypes(autocast(f, jnp.bfloat16)) == ["bfloat16"] * 3
