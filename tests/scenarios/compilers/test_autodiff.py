"""What only a transformed program with derivatives can get wrong (62-82), and how precise it is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.compiler_programs import (
    COMBINATIONS,
    DTYPES,
    cast,
    of,
    result_dtypes,
    softmax,
)
from tests.support.jaxprs import assert_dots_run_in, trace

W = of(6, 6) / 2
LOWEST = float(np.finfo(np.float32).min)

in_combinations = pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)


BINARY_CROSS_ENTROPY = {
    "clip": lambda p, y: (
        -(
            y * jnp.log(jnp.clip(p, 1e-7, 1 - 1e-7))
            + (1 - y) * jnp.log(1 - jnp.clip(p, 1e-7, 1 - 1e-7))
        )
    ),
    "log1p": lambda p, y: -(y * jnp.log(p) + (1 - y) * jnp.log1p(-p)),
    "added": lambda p, y: -(y * jnp.log(p + 1e-7) + (1 - y) * jnp.log(1 - p + 1e-7)),
    "where": lambda p, y: -jnp.log(jnp.where(y > 0, p, 1 - p)),
    "in_a_call": jax.jit(lambda p, y: -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p))),
    "in_a_loop": lambda p, y: lax.map(
        lambda row: -jnp.log(jnp.where(row[1] > 0, row[0], 1 - row[0])), (p, y)
    ),
    "in_a_branch": lambda p, y: lax.cond(
        y[1, 0] > 0, lambda p: -jnp.log(jnp.where(y > 0, p, 1 - p)), lambda p: p, p
    ),
}


@pytest.mark.parametrize("entropy", BINARY_CROSS_ENTROPY.values(), ids=BINARY_CROSS_ENTROPY)
@in_combinations
def test_binary_cross_entropy_of_a_sigmoid(dtype, level, entropy):
    """67: within 0.05 of float32 at logits from -12 to 12; in 16 bits it would be infinite."""
    # Seven more elements of the sum are zeros.
    logits = np.linspace(-12, 12, 49, dtype=np.float32)[:, None] * np.eye(1, 8, dtype=np.float32)
    y = (np.arange(49) % 2).astype(np.float32)[:, None]
    fn = lambda w, x: entropy(jax.nn.sigmoid(x @ w), y)
    low, one = cast(fn, dtype, level), np.ones((8, 1), np.float32)
    assert_dots_run_in(dtype, trace(low, one, logits))
    slope = lambda f: jax.grad(lambda w: jnp.mean(f(w, logits)))
    run = lambda f: lambda w: (f(w, logits), slope(f)(w))
    found, expected = jax.jit(lambda w: (run(low)(w), run(fn)(w)))(one)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.05)


POSITIONS = {
    "iota": lambda ids: jnp.arange(65_530, 65_538, dtype=jnp.float32),
    "integers": lambda ids: jnp.arange(8).astype(jnp.float32) + 65_530,
    "data": lambda ids: ids.astype(jnp.float32),
}
ANGLES = {
    "einsum": lambda t, f: jnp.einsum("i,j->ij", t, f),
    "product": lambda t, f: t[:, None] * f[None],
    "outer": jnp.outer,
    "matmul": lambda t, f: t[:, None] @ f[None],
}


ROTATED = [*((position, "einsum") for position in POSITIONS), *(("iota", a) for a in ANGLES)]


@pytest.mark.parametrize(("positions", "angles"), dict.fromkeys(ROTATED))
@in_combinations
def test_rotary_embedding_at_position_65536(dtype, level, positions, angles):
    """74: angles, sines and cosines are those of float32, bit by bit."""
    frequencies = (1 / 10_000 ** (np.arange(4) / 4)).astype(np.float32)
    ids = np.arange(65_530, 65_538, dtype=np.int32)

    def tables(w, f, ids):
        angle = ANGLES[angles](POSITIONS[positions](ids), f)
        return angle, jnp.cos(angle), jnp.sin(angle), w @ w

    low = cast(tables, dtype, level, params=0)
    jaxpr = trace(low, W, frequencies, ids)
    assert set(result_dtypes(jaxpr, "cos", "sin")) == {"float32"}
    found = jax.jit(low)(W, frequencies, ids)[:3]
    expected = jax.jit(tables)(W, frequencies, ids)[:3]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


MASKS = {
    "where": lambda scores, mask: jnp.where(mask, scores, LOWEST),
    "where_1e38": lambda scores, mask: jnp.where(mask, scores, -1e38),
    "where_1e9": lambda scores, mask: jnp.where(mask, scores, -1e9),
    "added": lambda scores, mask: scores + jnp.where(mask, 0.0, LOWEST),
    "multiplied": lambda scores, mask: scores + (1.0 - mask.astype(jnp.float32)) * LOWEST,
    "constant": lambda scores, mask: scores + jnp.asarray(np.where(mask, 0, LOWEST), jnp.float32),
}


@pytest.mark.parametrize("apply", MASKS.values(), ids=MASKS)
@in_combinations
def test_a_fully_masked_row(dtype, level, apply):
    """75: neither values nor gradients are NaN."""
    mask = np.tri(6, dtype=bool)
    mask[2] = False
    fn = lambda w, x: softmax(apply(x @ w @ x.T, mask)) @ x
    low = cast(fn, dtype, level)
    assert_dots_run_in(dtype, trace(low, W, W))
    gradient = jax.grad(lambda w: jnp.sum(low(w, W) ** 2))
    found, expected, slope = jax.jit(lambda w: (low(w, W), fn(w, W), gradient(w)))(W)
    np.testing.assert_allclose(found, expected, atol=8 * float(jnp.finfo(dtype).eps))
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_conversion_per_parameter_in_the_compiled_program(dtype):
    """76: of the forward pass, for parameters that are used several times, also in a loop."""
    params = {"a": of(5, 7), "b": of(7, 5), "c": of(5, 5)}

    def fn(params, x):
        for _ in range(3):
            x = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
        return lax.fori_loop(0, 9, lambda _, h: jnp.tanh(h @ params["c"]), x) @ params["c"]

    text = jax.jit(cast(fn, dtype)).lower(params, of(3, 5)).compile().as_text()
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    for shape in ("5,7", "7,5", "5,5"):
        pattern = rf"{short}\[{shape}\][^ ]* convert\([^)]*\)"
        assert len(re.findall(pattern, text)) == 1
