"""How many bytes the backward pass keeps, as `explain` reports it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, CastPolicy, explain

W = np.ones((8, 8), np.float32)
X = np.ones((4, 8), np.float32)
ARRAY = 4 * 8  # elements of an activation


def kept(fn, *args, policy=BF16):
    totals = explain(fn, *args, policy=policy).totals
    return totals.residual_nbytes, totals.float32_residual_nbytes


def dense(params, x):
    return jnp.sum(jnp.sin(x @ params["w"]))


def deep(params, x):
    return jnp.sum(lax.scan(lambda h, w: (jnp.sin(h @ w), None), x @ params["w"], params["ws"])[0])


PARAMS = {"w": W, "ws": np.stack([W] * 3)}


def test_activations_count_and_parameters_do_not():
    # The input in bfloat16 and the cosine; the cast weight is a parameter.
    assert kept(dense, {"w": W}, X) == (2 * 2 * ARRAY, 0)
    # The input of the program itself is kept anyway; so the cosine alone.
    pinned = BF16.with_rules({"dot_general": CastPolicy.FP32})
    assert kept(dense, {"w": W}, X, policy=pinned) == (4 * ARRAY, 4 * ARRAY)


def test_without_parameters_all_float_inputs_count():
    # The derivative with respect to the input reads the weight: its copy is kept as well.
    assert kept(lambda x, w: jnp.sum(x @ w), X, W) == (2 * (ARRAY + 64), 0)


def test_a_loop_keeps_each_iteration():
    # Of each layer its input and the cosine; the slices of the stacked weights are parameters.
    # Before the loop the input of the program in bfloat16.
    assert kept(deep, PARAMS, X) == ((1 + 2 * 3) * 2 * ARRAY, 0)


def test_a_carry_that_starts_as_a_parameter_is_none():
    square = lambda p: jnp.sum(lax.scan(lambda h, _: (h * h, None), p["w"], None, length=3)[0])
    assert kept(square, {"w": W}) == (3 * 4 * 64, 3 * 4 * 64)


def test_checkpoint_keeps_less():
    layer = lambda w, x: jnp.sin(jnp.sin(jnp.sin(x @ w)))
    plain = lambda p, x: jnp.sum(layer(p["w"], layer(p["w"], x)))
    saved = jax.checkpoint(layer)
    checkpointed = lambda p, x: jnp.sum(saved(p["w"], saved(p["w"], x)))
    less, more = (kept(f, {"w": W}, X)[0] for f in (checkpointed, plain))
    assert 0 < less < more / 2


def test_constants_do_not_count():
    assert kept(lambda p, x: jnp.sum(p["w"] * jnp.arange(8.0)), {"w": W}, X) == (0, 0)


@jax.custom_vjp
def refuses(x):
    return x


def _forward(x):
    raise RuntimeError("no forward")


refuses.defvjp(_forward, lambda _, g: (g,))


@pytest.mark.parametrize(
    ("fn", "args"),
    {
        "a while loop": (
            lambda p, x: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ p, x),
            (),
        ),
        "a gradient": (jax.grad(lambda w, x: jnp.sum(x @ w)), ()),
        "a rule that raises": (lambda w, x: refuses(x @ w), ()),
        "no float input": (lambda i: jnp.sin(i.astype(np.float32)), (np.arange(3),)),
    }.values(),
)
def test_none_where_there_is_no_backward_pass(fn, args):
    report = explain(fn, *(args or (W, X)), policy=BF16)
    assert report.totals.residual_nbytes is report.totals.float32_residual_nbytes is None
    assert "kept for the backward pass" not in str(report)


def test_the_text_has_one_line_for_it():
    lines = str(explain(dense, {"w": W}, X, policy=BF16)).splitlines()
    assert "residuals   128 B kept for the backward pass, of them 0 B in float32" in lines
