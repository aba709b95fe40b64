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
)
from tests.support.jaxprs import assert_dots_run_in, trace

in_combinations = pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)


BINARY_CROSS_ENTROPY = {
    "clip": lambda p, y: (
        -(
            y * jnp.log(jnp.clip(p, 1e-7, 1 - 1e-7))
            + (1 - y) * jnp.log(1 - jnp.clip(p, 1e-7, 1 - 1e-7))
        )
    ),
    "added": lambda p, y: -(y * jnp.log(p + 1e-7) + (1 - y) * jnp.log(1 - p + 1e-7)),
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
