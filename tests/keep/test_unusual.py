"""Programs of which little can be planned: of complex values, and of numbers alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast, keep_less
from tests.support.numerics import relative_error

# A product of a complex and a real array is promoted.
pytestmark = pytest.mark.usefixtures("as_users_run_it")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 6), np.float32)
Z = X + 1j * RNG.standard_normal((4, 6)).astype(np.float32)
W = RNG.standard_normal((6, 6)).astype(np.float32)
FIRST = np.complex64([[5, 2 + 3j, 5j], [2 - 3j, 7, 1 + 7j], [-5j, 1 - 7j, 12]])


def of_complex_factor(x):
    lower = jnp.linalg.cholesky(x)
    return jnp.sum((lower - jnp.sin(lower)) ** 2)


def of_complex_products(z):
    y = jnp.sin(z) @ W
    return jnp.sum(jnp.abs(jnp.tanh(y) * jnp.exp(y * 0.1) + y))


def of_spectra(x):
    """The values are complex inside alone."""

    def step(x, _):
        spectrum = jnp.fft.rfft(jnp.tanh(x) * jax.nn.gelu(x))
        return jnp.fft.irfft(spectrum * jnp.abs(spectrum), n=6) @ W, None

    return jnp.mean(lax.scan(step, x, None, length=3)[0] ** 2)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("residuals", ["auto", "recompute"])
@pytest.mark.parametrize(
    ("fn", "x"), [(of_complex_factor, FIRST), (of_complex_products, Z), (of_spectra, X)]
)
def test_complex_values_are_kept(fn, x, residuals, transform):
    holomorphic = fn is of_complex_factor
    plain, again = (
        transform(jax.grad(f, holomorphic=holomorphic))(x)
        for f in (fn, keep_less(fn, residuals=residuals))
    )
    assert relative_error(*(np.stack([g.real, g.imag]) for g in (again, plain))) < 1e-5


@pytest.mark.parametrize("residuals", ["auto", "recompute", 0.5])
def test_a_program_of_numbers_alone(residuals):
    assert keep_less(lambda x: 3.0 * x**2, residuals=residuals)(2.0) == 12
    mixed = autocast(lambda x: 3.0 * x**2, compute_dtype="bfloat16", residuals=residuals)
    assert jax.jit(mixed, static_argnums=0)(2.0) == 12
    assert keep_less(lambda: jnp.sin(1.0), residuals=residuals)() == jnp.sin(1.0)
