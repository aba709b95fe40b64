"""How a step of a loop made a carry is known where the next one reads it, on values.

A row is a function that reads what the step before it made, and one that makes it of a product.
The product is exact: `ROWS` holds numbers of 8 bits, and the weight is the identity.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, autocast, explain
from jmp_autocast.interpreters.plan import mark_sweep
from jmp_autocast.interpreters.plan.marks import NONE
from tests.fuzz.comparison import interpreted
from tests.support.steps import LOOPS, scanned

N, D = 16, 8
RNG = np.random.default_rng(0)
ROWS = 2 + np.round(RNG.normal(size=(N, D)) * 32) / 32
ARGS = np.eye(D, dtype=np.float32), ROWS.astype(np.float32)
SMOOTH = np.tri(D, dtype=np.float32) / D
NEAR = np.float32([[1], [1.01], [0.99], [1.02], [1.03], [1.04]])


def with_means(h):
    a, b = (h * NEAR)[:5], (h * NEAR)[1:]
    return a.T @ b / 5, jnp.outer(a.sum(0), b.sum(0)) / 25


def shares(h):
    """Of the numbers that are not above each: columns that add up to 1, from the operand itself."""
    counted = (h[:, None] <= h).astype(h.dtype)
    return counted / counted.sum(0)


# mark: what reads it, and what makes it
READ = {
    "multiplied": (
        lambda m, h: m[0] - m[1],
        lambda h: (h * h[::-1], (h - 0.03) * (h[::-1] + 0.03)),
    ),
    "squares": (
        lambda m, h: m[0] + m[1] - 2 * m[2],
        lambda h: ((h * h).sum(), ((h + 0.02) ** 2).sum(), h @ (h + 0.02)),
    ),
    "power": (lambda m, h: m @ shares(h) - (h @ shares(h)) ** 2, lambda h: h * h),
    "sums_powers, crosses": (
        lambda m, h: m[0] - m[1] * m[1],
        lambda h: ((h * h) @ SMOOTH, h @ SMOOTH),
    ),
    "of_sums": (lambda m, h: m[0] - m[1], with_means),
    "gram": (
        lambda m, h: jnp.diag(m)[:, None] + jnp.diag(m) - 2 * m,
        lambda h: (lambda c: c @ c.T)(h * NEAR),
    ),
    "counted": (lambda m, h: jnp.sin(m @ (SMOOTH + 0.1)), lambda h: jnp.arange(float(D)) + 1001),
}


def error(fn, policy):
    """The distance from float32."""
    run = lambda f: np.float64(interpreted(jax.jit(f).trace(*ARGS), ARGS)[0])
    want, found = run(fn), run(autocast(fn, policy=policy))
    return np.linalg.norm(found - want) / np.linalg.norm(want)


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", READ)
def test_the_next_step_knows_how_it_was_made(name, loop, policy):
    assert error(loop(*READ[name]), policy) <= 1e-4


# What is "multiplied" is right by the rule, too: no product consumes it.
WITHOUT = [(name, loop) for name in READ for loop in LOOPS if name != "multiplied"]


@pytest.mark.parametrize(("name", "loop"), WITHOUT)
def test_and_is_wrong_if_marks_do_not_go_round(name, loop, monkeypatch):
    unmarked = lambda body, inputs, memo: [
        NONE if i in body.carried else m for i, m in enumerate(inputs)
    ]
    monkeypatch.setattr(mark_sweep, "_gone_round", unmarked)
    assert not error(loop(*READ[name]), BF16) <= 0.004


def below_0_later(w, x):
    step = lambda made, row: ((row @ w) - (row @ w).max(), jnp.exp(made) @ SMOOTH)
    return lax.scan(step, x[0] @ w, x)[1]


# In float16 a product reads an `exp` in 16 bits where every step, and the first value, bounds it.
EXPONENTS = {
    "below 0": (scanned(lambda m, h: jnp.exp(m) @ SMOOTH, lambda h: h - h.max()), "float16"),
    "a square, negated": (scanned(lambda m, h: jnp.exp(m) @ SMOOTH, lambda h: -(h * h)), "float16"),
    "any": (scanned(lambda m, h: jnp.exp(m) @ SMOOTH, lambda h: h), "float32"),
    "below 0 from the second step on": (below_0_later, "float32"),
}


@pytest.mark.parametrize("name", EXPONENTS)
def test_what_holds_of_all_steps_holds_of_a_carry(name):
    fn, dtype = EXPONENTS[name]
    rows = [row for row in explain(fn, *ARGS, policy=FP16).rows if row.primitive == "dot_general"]
    assert rows[-1].operands[0] == dtype


def test_a_sum_of_exp_that_begins_with_a_product_is_read_in_float32():
    def summed(w, x):
        def step(total, row):
            total = total + jnp.exp(2 * (row @ w) + 6)
            return total, total @ SMOOTH

        return lax.scan(step, x[0] @ w, x)[1]

    assert np.abs(summed(*ARGS)).max() > 65504 / 8  # an eighth of each of eight: beyond float16
    assert error(summed, FP16) <= 0.004
