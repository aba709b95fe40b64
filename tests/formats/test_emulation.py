"""Scopes with a number format: what is rounded there, and what its derivatives round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import (
    BF16,
    Emulated,
    Policy,
    autocast,
    compute_precision,
    explain,
    formats,
    full_precision,
)
from tests.support.jaxprs import trace

random = np.random.default_rng(0)
W = random.normal(size=(32, 16)).astype(np.float32)
V = random.normal(size=(16, 8)).astype(np.float32)
X = random.normal(size=(4, 32)).astype(np.float32)


def model(params, x):
    with jax.named_scope("mlp"):
        h = jnp.tanh(x @ params["w"])
    with jax.named_scope("head"):
        return h @ params["v"]


PARAMS = {"w": W, "v": V}


def run(emulated, fn=model, args=(PARAMS, X), scope="mlp"):
    policy = Policy("bfloat16").with_scopes({"*": "float32", scope: emulated})
    return jax.jit(autocast(fn, policy=policy, params=0))(*args)


def nearest(x, name="e4m3"):
    return formats.rounded(x, name)


def dot(x, w):
    return jnp.matmul(x, w, precision="highest")


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def in_operations(x):
    w = nearest(W, "e5m2")
    return nearest(jnp.tanh(nearest(dot(nearest(x, "e5m2"), w), "e5m2")), "e5m2")


# What is asked of the scope, and what its result is.
PARTS = {
    "products": ("e4m3", lambda x: jnp.tanh(dot(nearest(x), nearest(W)))),
    "a dtype": (jnp.float8_e5m2, lambda x: jnp.tanh(dot(nearest(x, "e5m2"), nearest(W, "e5m2")))),
    "operations": (Emulated("e5m2", "operations"), in_operations),
    "parameters": (Emulated("e2m1", "parameters"), lambda x: jnp.tanh(dot(x, nearest(W, "e2m1")))),
    "blocks": (
        "mxfp4",
        lambda x: jnp.tanh(dot(formats.rounded(x, "mxfp4"), formats.rounded(W, "mxfp4", axis=0))),
    ),
    "blocks of parameters": (
        Emulated("mxfp4", "parameters"),
        lambda x: jnp.tanh(dot(x, formats.rounded(W, "mxfp4", axis=0))),
    ),
}


@pytest.mark.parametrize(("emulated", "expected"), PARTS.values(), ids=PARTS)
def test_what_a_scope_rounds(emulated, expected):
    close(run(emulated), dot(expected(X), V))


@pytest.mark.parametrize("name", ["e4m3", "operations"])
def test_everything_in_it_is_float32(name):
    emulated = Emulated("e4m3", name) if name == "operations" else name
    policy = BF16.with_scopes({"mlp": emulated})
    jaxpr = trace(autocast(model, policy=policy, params=0), PARAMS, X)
    dots = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("dot_general", "custom_jvp_call")]
    assert str(dots[0].invars[0].aval.dtype) == "float32"
    assert "bf16[4,8]" in str(jaxpr)  # the head's, which is in no scope
    (row,) = (r for r in explain(model, PARAMS, X, policy=policy).rows if r.primitive == "tanh")
    assert row.results == ("float32",)


def test_a_report_says_which_format():
    policy = BF16.with_scopes({"mlp": "e4m3"})
    rows = explain(model, PARAMS, X, policy=policy).rows
    assert ("EMIT", "e4m3 products") in {(row.reason, row.cause) for row in rows}


# --- derivatives ---------------------------------------------------------------------------------

GRADIENTS = {"the usual one": ("e4m3", "e5m2"), "its own": ("e3m4", "e3m4")}


@pytest.mark.parametrize(("name", "gradient"), GRADIENTS.values(), ids=GRADIENTS)
def test_cotangents_are_rounded_and_pass_through_the_rounding(name, gradient):
    fn = lambda params, x: jnp.sum(jnp.sin(run(name, lambda p, x: x @ p["w"], (params, x), "*")))
    dw, dx = jax.grad(fn, argnums=(0, 1))(PARAMS, X)
    x, w = nearest(X, name), nearest(W, name)
    cotangent = nearest(jnp.cos(dot(x, w)), gradient)
    close(dw["w"], dot(x.T, cotangent))
    close(dx, dot(cotangent, w.T))


def test_another_format_for_gradients():
    emulated = Emulated("e4m3", gradient="e8m23")
    fn = lambda x: jnp.sum(run(emulated, lambda p, x: x @ p["w"], (PARAMS, x), "*") ** 2)
    product = dot(nearest(X), nearest(W))
    close(jax.grad(fn)(X), dot(2 * product, nearest(W).T))


def test_cotangents_of_operations_are_rounded_and_those_of_parameters_are_not():
    fn = lambda of: (
        lambda x: jnp.sum(
            1.1 * run(Emulated("e5m2", of), lambda p, x: x * p["w"][:, 0], (PARAMS, x), "*")
        )
    )
    w = nearest(W[:, 0], "e5m2")
    rows = jnp.broadcast_to(w, X.shape)
    close(jax.grad(fn("parameters"))(X), jnp.float32(1.1) * rows)
    close(jax.grad(fn("operations"))(X), nearest(jnp.float32(1.1), "e5m2") * rows)


def test_both_directions_and_their_derivatives():
    fn = lambda x: jnp.sum(run("e4m3", args=(PARAMS, x)) ** 2)
    tangent = jnp.ones_like(X)
    _, forward = jax.jvp(lambda x: run("e4m3", args=(PARAMS, x)), (X,), (tangent,))
    # Without a cotangent nothing of the derivative is rounded: it is that of what was rounded.
    h = dot(nearest(X), nearest(W))
    close(forward, dot((1 - jnp.tanh(h) ** 2) * dot(tangent, nearest(W)), V))
    hessian = jax.jvp(jax.grad(fn), (X,), (tangent,))[1]
    assert jnp.isfinite(hessian).all()
    assert jnp.abs(hessian).max() > 0


@pytest.mark.parametrize("name", ["e4m3", "mxfp4"])
@pytest.mark.parametrize("of", ["products", "operations"])
def test_a_batch_rounds_as_its_examples_do(of, name):
    emulated, xs = Emulated(name, of), jnp.stack([X, 3 * X])
    fn = jax.jit(jax.grad(lambda x: jnp.sum(run(emulated, args=(PARAMS, x)) ** 2)))
    close(jax.jit(jax.vmap(fn))(xs), jnp.stack(list(map(fn, xs))))


# --- other programs ------------------------------------------------------------------------------


def test_loops_calls_and_rules_of_users():
    @jax.custom_vjp
    def rule(w, x):
        return x @ w

    rule.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))
    w = W[:, :16] @ V[:, :1] @ np.ones((1, 32), np.float32)
    programs = {
        "scan": lambda w, x: lax.scan(lambda h, _: (h @ w, None), x, length=1)[0],
        "jit": jax.jit(lambda w, x: x @ w),
        "checkpoint": jax.checkpoint(lambda w, x: x @ w),
        "rule": rule,
        "cond": lambda w, x: lax.cond(x[0, 0] < 9, lambda: x @ w, lambda: x),
    }
    expected = dot(nearest(X), nearest(w))
    for name, fn in programs.items():

        def cosine(x, fn=fn):
            out = run("e4m3", fn, (w, x), "*")
            return jnp.sum(jnp.cos(out)), out

        (_, out), gradient = jax.jit(jax.value_and_grad(cosine, has_aux=True))(X)
        close(out, expected)
        # The product of a rule of the user's own rounds both of its operands, as any other does.
        cotangent = nearest(-jnp.sin(expected), "e4m3" if name == "rule" else "e5m2")
        exact = dot(cotangent, nearest(w).T)
        np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-4, err_msg=name)


def test_a_convolution():
    image = random.normal(size=(2, 3, 3, 32)).astype(np.float32)
    kernel = random.normal(size=(2, 2, 32, 4)).astype(np.float32)
    conv = lambda w, x: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    squares = lambda run: jax.jit(jax.value_and_grad(lambda w: jnp.sum(run(w) ** 2)))
    _, exact = squares(lambda w: conv(w, image))(kernel)
    for name, axes in {"e4m3": (-1, -1), "mxfp6": (3, 2)}.items():
        pairs = zip((image, kernel), axes, strict=True)
        x, w = (formats.rounded(a, name, axis=k) for a, k in pairs)
        fn = squares(lambda w, name=name: run(name, conv, (w, image), "*"))
        value, gradient = fn(kernel)
        np.testing.assert_allclose(value, jnp.sum(conv(w, x) ** 2), rtol=1e-5)
        assert 1e-3 < jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(exact) < 0.2


def test_stochastic_rounding_is_a_function_and_right_in_the_mean():
    # The weight is in the format already. Each row of the batch has draws of its own.
    w, x = nearest(W), np.tile(X[:1], (512, 1))
    draw = lambda seed, x: run(
        Emulated("e4m3", rounding="stochastic", seed=seed), lambda w, x: x @ w, (w, x), "*"
    )
    found = draw(0, x)
    np.testing.assert_array_equal(found, draw(0, x))
    assert (found != draw(1, x)).any()
    assert (found[1:, 0] != draw(0, np.concatenate([x[1:], 2 * x[:1]]))[1:, 0]).any()
    error = lambda y: float(jnp.linalg.norm(y - dot(X[0], w)))
    assert error(found.mean(0)) < error(dot(nearest(X[0]), w)) / 4


def test_overflow():
    fn = lambda e: run(
        e, lambda p, x: x @ p, (np.eye(4, dtype=np.float32) * 1e6, np.ones((4, 4), np.float32)), "*"
    )
    assert jnp.isinf(fn("e5m2")).any()
    assert jnp.isnan(fn("e4m3")).any()
    assert fn(Emulated("e4m3", overflow="saturate")).max() == 448


def test_words_in_the_code_win():
    def fn(params, x):
        with full_precision():
            y = x @ params["w"]
        with compute_precision(jnp.bfloat16):
            return y, x @ params["w"]

    full, low = run("e4m3", fn, scope="*")
    close(full, dot(X, W))
    close(low, jnp.matmul(*(a.astype(jnp.bfloat16) for a in (X, W))).astype(jnp.float32))


def test_what_is_declared_in_16_bits_is_rounded_in_its_dtype():
    args = W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    found = run("e4m3", lambda w, x: x @ w, args, "*")
    rounded = (nearest(a.astype(jnp.float32)).astype(jnp.bfloat16) for a in args)
    w, x = rounded
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, x @ w)


def test_what_holds_no_float_is_left_alone():
    def fn(params, x):
        return (
            jnp.argsort(x[0]),
            x[0] > 0,
            jax.random.key(0),
            x[:2].astype(jnp.int32) @ jnp.ones((32, 2), jnp.int32),
        )

    for of in ("products", "operations", "parameters"):
        order, positive, _, count = run(Emulated("e4m3", of), fn, scope="*")
        assert order.dtype == jnp.int32
        assert positive.dtype == bool
        assert count.dtype == jnp.int32
