"""What a call reads in float32 alone is cast before it, once for all readers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, FP16, autocast
from tests.support.jaxprs import find

RNG = np.random.default_rng(0)
ROWS, WIDTH = 256, 64


def bf16(*shape):
    """Numbers that bfloat16 holds, and float16."""
    drawn = RNG.normal(size=shape).astype(np.float32)
    return jnp.asarray(drawn).astype(jnp.bfloat16).astype(jnp.float32)


# The product is exact: what is rounded is its cotangent.
X, W = bf16(ROWS, WIDTH), jnp.eye(WIDTH)


def normalized(x, w, t, variance=jnp.var):
    h = x @ w
    scale = jax.lax.rsqrt(variance(h, 0) + 1e-3)
    return jnp.sum(t * (h - jnp.mean(h, 0)) * scale)


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["o1", "compute", "tensor_cores"])
def test_cotangents_of_a_batch_norm_are_added_in_float32(policy, level):
    # The cotangent of a norm is orthogonal to what it reads: those of its readers nearly cancel.
    t = X + 0.1 * bf16(ROWS, WIDTH)
    exact = jax.grad(normalized, 1)(X, W, t)
    found = jax.jit(jax.grad(autocast(normalized, policy=policy.with_level(level)), 1))(X, W, t)
    # Their sum is rounded once: 0.17 % in bfloat16. Each by itself: 2.4 %.
    error = float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
    assert error < 0.5 * float(jnp.finfo(policy.compute_dtype).eps)


def test_cotangents_of_a_unit_vector_are_added_in_float32():
    """That of `z / norm(z)` is orthogonal to `z`, as with pairs of images and texts."""

    def cosine(x, w, t):
        z = x @ w
        return jnp.sum(t * z / jnp.linalg.norm(z, axis=-1, keepdims=True))

    t = X + 0.1 * bf16(ROWS, WIDTH)
    exact = jax.grad(cosine, 1)(X, W, t)
    found = jax.jit(jax.grad(autocast(cosine, policy=BF16), 1))(X, W, t)
    # Rounded once: 0.17 %. Each by itself: 2.4 %.
    assert float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)) < 3e-3


def variances(jaxpr):
    return [eqn for eqn in find(jaxpr, "jit") if eqn.params["name"] == "_var"]


def test_the_call_stays_as_it_is():
    t = jnp.ones((ROWS, WIDTH))
    plain = variances(jax.make_jaxpr(normalized)(X, W, t))
    ours = jax.make_jaxpr(autocast(normalized, policy=BF16))(X, W, t)
    assert [eqn.params["jaxpr"] is plain[0].params["jaxpr"] for eqn in variances(ours)] == [True]
    # One cast of the product, for the mean, the variance and the difference.
    casts = [
        e for e in find(ours, "convert_element_type") if e.invars[0].aval.shape == (ROWS, WIDTH)
    ]
    widened = [e for e in casts if e.outvars[0].aval.dtype == jnp.float32]
    assert len(widened) == 1


def test_what_is_computed_again_is_kept_in_16_bits():
    again = functools.partial(normalized, variance=jax.checkpoint(jnp.var, static_argnums=1))
    ours = jax.make_jaxpr(autocast(again, policy=BF16))(X, W, jnp.ones((ROWS, WIDTH)))
    (eqn,) = [*find(ours, "remat2"), *find(ours, "checkpoint")]
    assert eqn.invars[0].aval.dtype == jnp.bfloat16


def test_what_goes_to_another_device_goes_there_in_16_bits():
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    moved = jax.jit(lambda x: jnp.var(x, 0), in_shardings=there)
    again = functools.partial(normalized, variance=lambda x, _: moved(x))
    ours = jax.make_jaxpr(autocast(again, policy=BF16))(X, W, jnp.ones((ROWS, WIDTH)))
    (eqn,) = [e for e in find(ours, "jit") if e.params["name"] == "<lambda>"]
    assert eqn.invars[0].aval.dtype == jnp.bfloat16


def test_masked_scores_stay_in_16_bits():
    """`jnp.where` is a call, too: it returns what it is given, and a softmax reads that."""

    def attention(x, w, mask):
        return jax.nn.softmax(jnp.where(mask, x @ w, -jnp.inf))

    ours = jax.make_jaxpr(autocast(attention, policy=BF16))(X, W, X > 0)
    assert {eqn.outvars[0].aval.dtype.name for eqn in find(ours, "select_n")} == {"bfloat16"}


def test_a_guard_is_said_where_it_is():
    """A number that float16 cannot hold keeps the select in float32, and not its operand."""

    def masked(x, w, mask):
        return jnp.where(mask, x @ w, -1e9)

    planned = autocast(masked, policy=FP16).planned(X, W, X > 0)
    inner = next(plan.inner[0] for plan in planned.plan.equations if plan.inner)
    assert "LITERAL" in [plan.reason.code.value for plan in inner.equations]
