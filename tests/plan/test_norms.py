"""A norm that is written as a product has the digits and the range of one written as a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, FP16, autocast, explain
from jmp_autocast.interpreters.plan import consumers, needs
from jmp_autocast.interpreters.primitives import reading
from tests.fuzz.comparison import interpreted

RNG = np.random.default_rng(0)
W = np.float32(RNG.normal(size=(8, 8)) / np.sqrt(8))
X = np.float32(RNG.normal(size=(12, 8)))

SQUARES = {
    "einsum": lambda h: jnp.einsum("nd,nd->n", h, h),
    "vmap": jax.vmap(lambda h: h @ h),
    "vdot": jax.vmap(lambda h: jnp.vdot(h, h)),
    "jit": jax.jit(lambda h: jnp.einsum("nd,nd->n", h, h)),
    "cond": lambda h: jax.lax.cond(h[0, 0] > -99, SQUARES["vmap"], SQUARES["einsum"], h),
    "scan": lambda h: jax.lax.scan(lambda c, h: (c, h @ h), 0, h)[1],
}


def error(fn, policy, args):
    run = lambda f: np.float64(interpreted(jax.jit(f).trace(*args), args)[0])
    want, found = run(fn), run(autocast(fn, policy=policy))
    return np.linalg.norm(found - want) / np.linalg.norm(want)


def slope(name, x, policy=None):
    """The gradient of the sum of unit vectors that point to one side: a small difference."""

    def units(w):
        h = x @ w + 3 + 4
        return (h / jnp.sqrt(SQUARES[name](h))[:, None]).sum()

    fn = units if policy is None else autocast(units, policy=policy)
    return np.float64(interpreted(jax.jit(jax.grad(fn)).trace(W), [W])[0])


@pytest.fixture
def without(monkeypatch):
    """Norms count as products, to which values lead in 16 bits."""
    monkeypatch.setattr(needs, "is_norm", lambda eqn: False)
    monkeypatch.setattr(consumers, "is_norm", lambda eqn: False)
    monkeypatch.setattr(reading, "is_norm", lambda eqn: False)


@pytest.mark.parametrize("name", SQUARES)
def test_the_square_of_a_long_vector_is_finite(name):
    of_hundreds = lambda w, x: SQUARES[name](200 * (x @ w))
    assert error(of_hundreds, FP16, (W, X)) < 0.001


@pytest.mark.parametrize("name", [name for name in SQUARES if name != "cond"])
def test_it_is_finite_where_a_product_reads_the_vector_in_16_bits(name):
    def of_hundreds(w, x):
        h = 200 * (x @ w)
        return SQUARES[name](h) / 1e4, h @ w

    assert error(of_hundreds, FP16, (W, X)) < 0.001


# What steers the branches reads the vectors in 16 bits.
@pytest.mark.parametrize("name", [name for name in SQUARES if name != "cond"])
def test_a_unit_vector_has_a_gradient(name):
    want, found = slope(name, X), slope(name, X, BF16)
    assert np.linalg.norm(found - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize("name", SQUARES)
@pytest.mark.usefixtures("without")
def test_and_both_are_wrong_without_the_row(name):
    assert not error(lambda w, x: SQUARES[name](200 * (x @ w)), FP16, (W, X)) < 0.001
    want, found = slope(name, X), slope(name, X, BF16)
    assert not np.linalg.norm(found - want) < 0.015 * np.linalg.norm(want)


@pytest.mark.parametrize(
    "product",
    [
        lambda h: h.T @ h,
        lambda h: jnp.einsum("nd,nd->n", h, 2 * h),
        lambda h: jnp.einsum("nd,md->nm", h, h),
    ],
    ids=["a matrix", "two vectors", "all pairs"],
)
def test_other_products_are_no_norms(product):
    rows = explain(lambda w, x: product(x @ w) @ jnp.ones(12)[:8], W, X[:8], policy=BF16).rows
    products = [row for row in rows if row.primitive == "dot_general"]
    assert products[1].operands == ("bfloat16", "bfloat16")
