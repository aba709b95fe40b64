"""Complex values and numbers alone, of which little is planned; symbolic sizes, planned as any."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast, keep_less
from jmp_autocast.inspect import explain_kept
from jmp_autocast.interpreters.compat.registration import define_primitive
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
    mixed = keep_less(autocast(lambda x: 3.0 * x**2, "bfloat16"), residuals=residuals)
    assert jax.jit(mixed, static_argnums=0)(2.0) == 12
    assert keep_less(lambda: jnp.sin(1.0), residuals=residuals)() == jnp.sin(1.0)


def of_blocks(w, x):
    def block(x, _):
        h = jax.nn.gelu((x - jnp.mean(x, -1, keepdims=True)) @ w)
        return x + jax.nn.softmax(h @ h.T) @ h, None

    grown = lax.scan(block, jnp.concatenate([x, jnp.exp(-x)]), None, length=3)[0]
    return jnp.mean(jnp.tanh(grown @ w) ** 2)


@pytest.mark.parametrize(
    ("residuals", "level"), [("auto", "o1"), ("recompute", "compute"), (0.5, "o1")]
)
def test_symbolic_sizes_are_planned_as_any(residuals, level):
    mixed = keep_less(autocast(of_blocks, policy=BF16.with_level(level)), residuals=residuals)
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 6"), jnp.float32)
    found, concrete = (
        explain_kept(mixed, W, x) for x in (symbolic, jax.ShapeDtypeStruct((128, 6), jnp.float32))
    )
    assert (found.nbytes, found.declared_nbytes) == (concrete.nbytes, concrete.declared_nbytes)
    assert found.nbytes < found.declared_nbytes
    assert found.islands == concrete.islands

    exported = jax.export.export(jax.jit(jax.grad(mixed)))(W, symbolic)
    assert relative_error(exported.call(W / 6, X), jax.grad(of_blocks)(W / 6, X)) < 2e-2


def test_a_loop_of_a_symbolic_length_is_planned():
    def loss(w, x):
        return jnp.sum(lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), x[0], x)[0] ** 2)

    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 6"), jnp.float32)
    gradient = jax.grad(keep_less(loss, residuals="recompute"))
    exported = jax.export.export(jax.jit(gradient))(W, symbolic)
    np.testing.assert_allclose(exported.call(W, X), jax.grad(loss)(W, X), rtol=1e-5)


def test_what_marks_a_program_stays():
    # K-FAC finds the losses of a program by primitives whose results nobody reads.
    tag = define_primitive("tag", aval=lambda x: x)

    def loss(w, x):
        y = jnp.tanh(x @ w)
        tag.bind(y)
        return jnp.mean(y**2)

    fn = keep_less(loss, residuals="recompute")
    assert "tag" in [e.primitive.name for e in jax.make_jaxpr(fn)(W, X).jaxpr.eqns]
