"""Parameters are cast once, and their gradients still accumulate in float32."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast
from jmp_autocast.interpreters.compat import jaxpr_as_fun
from tests.support.jaxprs import assert_dots_run_in, casts, find, inner_jaxprs, open_jaxpr, trace

DTYPES = ["bfloat16", "float16"]
USES = 513

# One large term and 512 small ones, each exact in the dtype, that sum to 2. A small one is half a
# unit in the last place of the large one: added to it one by one in 16 bits, they all vanish.
TERMS = {"bfloat16": (1.0, 2.0**-9), "float16": (1.75, 2.0**-11)}


def rows(dtype):
    """(513, 1, 8): the large term is used last, so that a backward pass meets it first."""
    large, small = TERMS[dtype]
    values = np.full((USES, 1, 8), small, np.float32)
    values[-1] = large
    return jnp.asarray(values)


def params():
    return {"w": jnp.tile(jnp.array([[1.0, -0.5], [0.5, 2.0]]), (4, 4))}


def unrolled(w, xs):
    total, small, large = jnp.float32(0), xs[0], xs[-1]
    for i in range(USES):  # lax: a jnp function would be one jit per use
        y = lax.dot(large if i == USES - 1 else small, w)
        total = lax.add(total, lax.reduce_sum(y, axes=(0, 1)))
    return total


def scan_with(layer):
    def scan(w, xs):
        return lax.scan(lambda total, x: (total + layer(w, x), None), jnp.float32(0), xs)[0]

    return scan


def use(w, x):
    return (x @ w).sum()


def fori(w, xs):
    return lax.fori_loop(0, USES, lambda i, total: total + use(w, xs[i]), jnp.float32(0))


def while_loop(w, xs):
    """The trip count is a traced value: forward mode only."""
    end = jnp.int32(USES) + xs[0, 0, 0].astype(jnp.int32)
    body = lambda carry: (carry[0] + 1, carry[1] + use(w, xs[carry[0]]))
    return lax.while_loop(lambda carry: carry[0] < end, body, (jnp.int32(0), jnp.float32(0)))[1]


def while_condition(w, xs):
    """The condition reads the weight, too: a loop that ends when a product is large."""
    low = lambda i: jnp.sum(use(w, xs[i])) < 1e6
    body = lambda carry: (carry[0] + 1, carry[1] + use(w, xs[carry[0]]))
    keep_on = lambda carry: (carry[0] < USES) & low(carry[0])
    return lax.while_loop(keep_on, body, (jnp.int32(0), jnp.float32(0)))[1]


def nested_scan(w, xs):
    inner = scan_with(use)
    outer = lambda total, block: (total + inner(w, block), None)
    return lax.scan(outer, jnp.float32(0), xs.reshape(USES // 27, 27, 1, 8))[0]


LOOPS = {
    "scan": scan_with(use),
    "fori": fori,
    "nested_scan": nested_scan,
    "scan_of_jit": scan_with(jax.jit(use)),
    "scan_of_remat": scan_with(jax.checkpoint(use)),
    "scan_of_cond": scan_with(lambda w, x: lax.cond(x[0, 0] > 0, use, lambda w, x: 0.0, w, x)),
}
WITH_WHILE = LOOPS | {"while": while_loop, "while_condition": while_condition}


def loss_of(loop):
    return lambda params, xs: loop(params["w"], xs)


def run(jaxpr, *args):
    """Evaluates a jaxpr that was traced for its dtypes, to trace each program once."""
    return jax.jit(jaxpr_as_fun(jaxpr))(*jax.tree.leaves(args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_cast_loses_half_the_gradient_and_a_source_view_none(dtype):
    loss = loss_of(LOOPS["scan"])

    def shared(params, xs):
        """What `params.astype(dtype)` at the top of a function does."""
        low = {"w": params["w"].astype(dtype)}
        step = lambda total, x: (total + use(low["w"], x).astype(jnp.float32), None)
        return lax.scan(step, jnp.float32(0), xs.astype(dtype))[0]

    ours = autocast(loss, dtype)
    grads = [jax.grad(f)(params(), rows(dtype))["w"] for f in (loss, ours, shared)]
    np.testing.assert_allclose(grads[0], 2.0, rtol=1e-6)
    np.testing.assert_allclose(grads[1], 2.0, rtol=1e-3)
    np.testing.assert_array_equal(grads[2], TERMS[dtype][0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_513_uses_in_a_loop(loop, dtype):
    grad = jax.grad(autocast(loss_of(loop), dtype))
    jaxpr = trace(grad, params(), rows(dtype))
    assert_dots_run_in(dtype, jaxpr)
    np.testing.assert_allclose(run(jaxpr, params(), rows(dtype))[0], 2.0, rtol=1e-3)


# A matmul gives its weight a gradient in float32 by itself; other readers read a view.
BESIDE_ACTIVATIONS = {
    "factor": lambda w, x: jnp.sum((w[:1] * (x @ jnp.eye(8))) @ jnp.ones((8, 1))),
    "maximum": lambda w, x: jnp.sum(jnp.maximum(w[:1], x @ -jnp.eye(8)) * x),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use", BESIDE_ACTIVATIONS)
def test_513_uses_beside_an_activation(use, dtype):
    # No product consumes `w` as its weight, which would make it a parameter.
    fn = autocast(loss_of(scan_with(BESIDE_ACTIVATIONS[use])), dtype, params=0)
    w = {"w": jnp.ones((8, 8))}
    jaxpr = trace(jax.grad(fn), w, rows(dtype))
    assert casts_of_shape(jaxpr, (8, 8), dtype)
    expected = np.zeros((8, 8))
    expected[0] = 2
    np.testing.assert_allclose(run(jaxpr, w, rows(dtype))[0], expected, rtol=1e-3)


@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("behind", [lambda w: w, lax.optimization_barrier], ids=["w", "barrier"])
def test_513_uses_unrolled(behind):
    loss = loss_of(lambda w, xs: unrolled(behind(w), xs))
    fn = autocast(loss, jnp.bfloat16)
    grad = jax.grad(fn)(params(), rows("bfloat16"))["w"]
    np.testing.assert_allclose(grad, 2.0, rtol=1e-3)


def test_values_that_are_read_often_have_one_view_for_each_use():
    def loss(w, x):
        h = x @ w
        return sum(jnp.sum((jnp.tanh(h) @ w) * (h @ w)) for _ in range(9))

    assert_equal_twice(loss, views=18)


@pytest.mark.parametrize("where", ["returned", "summed"])
def test_a_float32_reading_is_one_of_the_eight(where):
    """An outer `autocast` saw the cast, counted eight uses, and made views of its own."""

    def program(w, x):
        h = x @ w
        uses = [h @ w for _ in range(7)]
        return (uses, h) if where == "returned" else (uses, jnp.sum(h), jnp.sum(h**2))

    assert_equal_twice(program, views=7)


def assert_equal_twice(loss, views):
    once = autocast(loss, jnp.bfloat16)
    twice = autocast(once, jnp.bfloat16)
    args = params()["w"], jnp.ones((4, 8))
    assert str(trace(twice, *args)) == str(trace(once, *args))
    assert len(find(trace(once, *args), "source_view")) == views


def test_513_uses_where_autocast_sees_the_backward_pass():
    fn = autocast(jax.grad(loss_of(LOOPS["scan"])), jnp.bfloat16)
    jaxpr = trace(fn, params(), rows("bfloat16"))
    # The gradient of one row is an outer product: it sums nothing, and float32 is as fast.
    product, outer = find(jaxpr, "dot_general")
    assert {v.aval.dtype.name for v in (*product.invars, *product.outvars)} == {"bfloat16"}
    assert outer.outvars[0].aval.dtype == "float32"
    np.testing.assert_allclose(run(jaxpr, params(), rows("bfloat16"))[0], 2.0, rtol=1e-3)


@pytest.mark.parametrize("loop", ["scan", "while", "while_condition"])
def test_513_uses_in_forward_mode(loop):
    fn = autocast(loss_of(WITH_WHILE[loop]), jnp.bfloat16)
    jacobian = jax.jacfwd(fn)
    jaxpr = trace(jacobian, params(), rows("bfloat16"))
    assert_dots_run_in("bfloat16", jaxpr)
    np.testing.assert_allclose(run(jaxpr, params(), rows("bfloat16"))[0], 2.0, rtol=1e-3)


# Each is a bijection of the weight's elements, so that its gradient is 2 everywhere.
MOVES = {
    "transpose": lambda w: w.T,
    "reshape": lambda w: w.reshape(64).reshape(8, 8),
    "slice": lambda w: lax.concatenate([w, w], 0)[1:9],
    "broadcast": lambda w: jnp.broadcast_to(w[None], (3, 8, 8))[2],
    "flip": lambda w: w[::-1],
    "gather": lambda w: w[jnp.array([1, 0, 3, 2, 5, 4, 7, 6])],
    "pad": lambda w: lax.dynamic_slice(jnp.pad(w, 1), (1, 1), (8, 8)),
}


@pytest.mark.parametrize("inside", [False, True], ids=["once", "in_the_loop"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_moved_weight_is_still_a_leaf(move, inside):
    loop = scan_with(lambda w, x: use(move(w), x))
    loss = loss_of(loop if inside else lambda w, xs: LOOPS["scan"](move(w), xs))
    jaxpr = trace(jax.grad(autocast(loss, jnp.bfloat16)), params(), rows("bfloat16"))
    assert_dots_run_in("bfloat16", jaxpr)
    np.testing.assert_allclose(run(jaxpr, params(), rows("bfloat16"))[0], 2.0, rtol=1e-3)


def loop_bodies(jaxpr):
    """The jaxprs inside the loops of a program, at any depth."""
    for eqn in open_jaxpr(jaxpr).eqns:
        for inner in inner_jaxprs(eqn):
            if eqn.primitive.name in ("scan", "while"):
                yield inner
            else:
                yield from loop_bodies(inner)


def casts_of_shape(jaxpr, shape, dtype="bfloat16"):
    return [e for e in casts(jaxpr, "float32", dtype) if e.invars[0].aval.shape == shape]


@pytest.mark.parametrize("loop", WITH_WHILE.values(), ids=WITH_WHILE)
def test_a_weight_is_cast_once_and_outside_of_loops(loop):
    w = {"w": jnp.ones((8, 5))}  # no other value has this shape
    fn = autocast(loss_of(loop), jnp.bfloat16)
    jaxpr = trace(fn, w, rows("bfloat16"))
    assert len(casts_of_shape(jaxpr, (8, 5))) == 1
    bodies = list(loop_bodies(jaxpr))
    assert bodies
    assert not any(casts_of_shape(body, (8, 5)) for body in bodies)


def network(params, x):
    h = jnp.tanh(x @ params["a"] + params["bias"])
    for _ in range(3):
        h = jnp.tanh(h @ params["b"]) @ params["b"].T + h @ params["c"]
        h = (h * params["scale"]) @ params["c"]
    return h @ params["d"]


def network_params():
    shapes = {"a": (6, 5), "b": (5, 7), "c": (5, 5), "d": (5, 2), "bias": (5,), "scale": (1,)}
    return {n: jnp.full(s, 0.5) for n, s in shapes.items()}


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["forward", "grad"])
def test_one_cast_per_parameter(transform):
    loss = lambda p, x: jnp.sum(autocast(network, jnp.bfloat16)(p, x) ** 2)
    jaxpr = trace(transform(loss), network_params(), np.ones((4, 6), np.float32))
    count = dict.fromkeys(jaxpr.jaxpr.invars, 0)
    for eqn in casts(jaxpr, "float32", "bfloat16"):
        if eqn.invars[0] in count:
            count[eqn.invars[0]] += 1
    assert set(count.values()) == {1}


def quadratic(params, x):
    """Its derivatives are exact in 16 bits: the inputs are small integers."""
    h = x @ params["w"]
    return jnp.sum((h * h) @ np.array([[1], [2]] * 4, np.float32))


def grad_over_models(f):
    return lambda p, xs: jax.vmap(jax.grad(f))({"w": jnp.stack([p["w"]] * 3)}, xs)


COMPOSED = {
    "vmap_of_grad": lambda f: jax.vmap(jax.grad(f), (None, 0)),
    "vmap_of_grad_over_parameters": grad_over_models,
    "grad_of_vmap": lambda f: jax.grad(lambda p, xs: jax.vmap(f, (None, 0))(p, xs).sum()),
    "hessian_of_checkpoint": lambda f: jax.hessian(jax.checkpoint(f)),
    "linearize": lambda f: lambda p, x: jax.linearize(lambda p: f(p, x), p)[1](p),
}


@pytest.mark.parametrize("transform", COMPOSED.values(), ids=COMPOSED)
def test_composition(transform):
    p = {"w": np.kron(np.eye(4), [[1, 2], [3, -1]]).astype(np.float32)}
    x = np.tile(np.array([[[0, 1]], [[1, 1]], [[-1, 2]]], np.float32), 4)
    jaxpr = trace(transform(autocast(quadratic, jnp.bfloat16)), p, x)
    assert_dots_run_in("bfloat16", jaxpr)
    expected = jax.tree.leaves(jax.jit(transform(quadratic))(p, x))
    for a, b in zip(run(jaxpr, p, x), expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_constant_is_cast_at_trace_time():
    w = jnp.full((8, 5), 0.5)
    fn = autocast(lambda x: jnp.tanh(x @ w) @ w.T, jnp.bfloat16)
    jaxpr = trace(fn, np.ones((3, 8), np.float32))
    assert_dots_run_in("bfloat16", jaxpr)
    assert not casts_of_shape(jaxpr, (8, 5)) + casts_of_shape(jaxpr, (5, 8))
    assert "bfloat16" in {c.dtype.name for c in jaxpr.consts}


def test_a_tracer_that_is_closed_over():
    """Its uses read views: the function cannot know that someone differentiates outside."""
    xs = rows("bfloat16")
    loss = lambda w: autocast(lambda xs: LOOPS["scan"](w, xs), jnp.bfloat16)(xs)
    jaxpr = trace(jax.grad(loss), params()["w"])
    assert_dots_run_in("bfloat16", jaxpr)
    np.testing.assert_allclose(run(jaxpr, params()["w"])[0], 2.0, rtol=1e-3)
