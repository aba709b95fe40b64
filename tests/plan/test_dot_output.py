"""Where a contraction returns its float32 accumulator: by rule, and as the gradient of a source."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, Policy, autocast
from jmp_autocast.interpreters import ReasonCode
from jmp_autocast.interpreters.compat import Literal
from jmp_autocast.interpreters.plan.data import Contract
from tests.support.jaxprs import assert_dots_run_in, casts, find, trace
from tests.support.plans import plan_of, planned

ACCUMULATOR = BF16.with_rules(
    dict.fromkeys(["dot_general", "conv_general_dilated"], "FP32_APPEND_DTYPE")
)
W = np.asarray(jax.random.normal(jax.random.key(0), (8, 8)) / 3)
X = np.asarray(jax.random.normal(jax.random.key(1), (4, 8)))
KERNEL = np.asarray(jax.random.normal(jax.random.key(2), (3, 3, 2, 2)) / 4)
IMAGE = np.asarray(jax.random.normal(jax.random.key(3), (2, 6, 6, 2)))


def convolution(w, x):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


PROGRAMS = {
    "read_by_both": (lambda w, x: jnp.exp(y := x @ w) @ y.T, W, X),
    "residual": (lambda w, x: x + x @ w, W, X),
    "convolution": (lambda w, x: jnp.log1p(jnp.square(convolution(w, x))), KERNEL, IMAGE),
}


@pytest.mark.parametrize(("fn", "w", "x"), PROGRAMS.values(), ids=PROGRAMS)
def test_dtype_of_the_result_and_gradients_no_worse_than_rounded_ones(fn, w, x):
    jaxpr = trace(autocast(fn, policy=ACCUMULATOR, params=0, output_dtype="computed"), w, x)
    assert find(jaxpr, "accumulate")[0].outvars[0].aval.dtype == "float32"
    assert_dots_run_in("bfloat16", jaxpr)

    def gradient(fn):
        return jax.grad(lambda w: jnp.sum(jnp.square(fn(w, x))))

    exact = gradient(fn)(w)
    errors = []
    for policy in (BF16, ACCUMULATOR):
        found = gradient(autocast(fn, policy=policy, params=0))(w)
        assert found.dtype == jnp.float32
        errors.append(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
    assert errors[1] < max(1.1 * errors[0], 1e-3)
    assert errors[1] < 2e-2
    backward = trace(gradient(autocast(fn, policy=ACCUMULATOR, params=0)), w)
    assert_dots_run_in("bfloat16", backward)


def test_weight_gradient_is_the_accumulator():
    """A gradient of 257 is no bfloat16: rounded it is 256 or 258."""
    w, x = np.ones((8, 1), np.float32), np.repeat(np.float32([[256.0], [1.0]]), 8, 1)
    for policy in (BF16, ACCUMULATOR):
        fn = autocast(lambda w, x: jnp.sum(x @ w), policy=policy, params=0)
        assert float(jax.grad(fn)(w, x)[0, 0]) == 257.0
    kernel, images = np.ones((1, 1, 8, 1), np.float32), x[:, None, None]
    for policy, expected in ((BF16, 256.0), (ACCUMULATOR, 257.0)):
        fn = autocast(lambda w, x: jnp.sum(convolution(w, x)), policy=policy, params=0)
        assert float(jax.grad(fn)(kernel, images)[0, 0, 0, 0]) == expected


def test_weight_gradients_that_are_rounded_before_devices_add_them():
    """The matmul hands out 16 bits, which is what goes between devices; the rest is as before."""
    policy = Policy(jnp.bfloat16, level="by_hand")
    fn = autocast(lambda w, x: jnp.sum(jnp.exp(x @ w)), policy=policy, params=0)
    jaxpr = trace(jax.grad(fn), W, X)
    of_weight = [e for e in find(jaxpr, "dot_general") if e.outvars[0].aval.shape == W.shape]
    assert [e.outvars[0].aval.dtype for e in of_weight] == [jnp.bfloat16]
    assert [e.outvars[0].aval.shape for e in casts(jaxpr, "bfloat16", "float32")][-1] == W.shape
    assert_dots_run_in("bfloat16", jaxpr)
    found, exact = jax.grad(fn)(W, X), jax.grad(lambda w: jnp.sum(jnp.exp(X @ w)))(W)
    assert found.dtype == jnp.float32
    assert jnp.linalg.norm(found - exact) < 2e-2 * jnp.linalg.norm(exact)
    # The uses of one weight are added in float32 all the same: 257 of them, in a loop.
    w, xs = np.ones((8, 1), np.float32), np.ones((257, 1, 8), np.float32)
    uses = lambda w: lax.scan(lambda s, x: (s + jnp.sum(x @ w, dtype=jnp.float32), None), 0.0, xs)[
        0
    ]
    assert float(jax.grad(autocast(uses, policy=policy, params=0))(w)[0, 0]) == 257.0


def test_sums_are_float32_where_weight_gradients_are_rounded():
    """Rows of a table, positions and biases: a row's 1,024 cotangents stop at 256 in bfloat16."""

    def loss(params, tokens):
        return jnp.sum(params["table"][tokens] + params["positions"] + params["bias"])

    policy = Policy(jnp.bfloat16, level="by_hand")
    params = {"table": np.ones((4, 2)), "positions": np.ones((256, 2)), "bias": np.ones(2)}
    params = {name: np.float32(array) for name, array in params.items()}
    gradient = jax.grad(autocast(loss, policy=policy, params=0))
    tokens = np.zeros((4, 256), np.int32)
    sums = [
        e
        for name in ("reduce_sum", "scatter-add")
        for e in find(trace(gradient, params, tokens), name)
    ]
    assert {e.outvars[0].aval.dtype.name for e in sums} == {"float32"}
    found = gradient(params, tokens)
    assert float(found["table"][0, 0]) == float(found["bias"][0]) == 1024.0
    assert float(found["positions"][0, 0]) == 4.0


@pytest.mark.parametrize("first", [False, True], ids=["weight_first", "literal_first"])
def test_a_factor_that_is_a_literal(first):
    """It stays one, in 16 bits; the gradient of the other factor is the accumulator."""

    def fn(w, x):
        outer = jnp.tensordot(3.0, w, axes=0) if first else jnp.tensordot(w, 3.0, axes=0)
        return jnp.sum(outer * x)

    # A product that sums nothing is one of elements, unless a rule lowers it.
    policy = BF16.with_rules({"dot_general": "LOWER_PRECISION_FP"})
    half = autocast(fn, policy=policy, params=0)
    (contraction,) = find(trace(half, X, X), "accumulate")
    literal = contraction.invars[0 if first else 1]
    assert isinstance(literal, Literal)
    assert (literal.val, literal.aval.dtype) == (3.0, jnp.bfloat16)
    gradient = trace(jax.grad(half), X, X)
    assert find(gradient, "accumulate")[-1].outvars[0].aval.dtype == jnp.float32
    assert_dots_run_in("bfloat16", gradient)
    found, exact = jax.grad(half)(X, X), jax.grad(fn)(X, X)
    assert found.dtype == jnp.float32
    assert jnp.linalg.norm(found - exact) < 2e-2 * jnp.linalg.norm(exact)


def test_reason_and_cause():
    equation = planned(
        plan_of(lambda w, x: jnp.exp(x @ w), W, X, policy=ACCUMULATOR), "dot_general"
    )
    assert (equation.reason.code, equation.reason.cause) == (
        ReasonCode.DOT_OUT,
        "a rule asks for float32",
    )
    assert isinstance(equation.action, Contract)
    assert equation.action.of_sources
