"""What leaves the program: callbacks under transformations, Pallas kernels, foreign functions.

Callbacks outside of transformations are in `test_structural_opaque.py`, the order of ordered ones
in `test_structural_metadata.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback, pallas as pl

from jmp_autocast import autocast
from tests.support.jaxprs import assert_dots_run_in, dtypes, find, trace

W = np.random.default_rng(0).standard_normal((4, 4), np.float32) / 2
X = np.random.default_rng(1).standard_normal((3, 4), np.float32)
LIKE = jax.ShapeDtypeStruct((4,), jnp.float32)

half = functools.partial(autocast, compute_dtype=jnp.bfloat16)


class Seen:
    """Callbacks of each kind, which note the dtypes that they get."""

    def __init__(self):
        self.dtypes = []

    def note(self, x):
        self.dtypes.append(np.asarray(x).dtype.name)

    def double(self, x):
        self.note(x)
        return 2 * np.asarray(x)

    def pure(self, row):
        return jax.pure_callback(self.double, LIKE, row @ W, vmap_method="sequential") @ W

    def io(self, row):
        return io_callback(self.double, LIKE, row @ W) @ W

    def debug(self, row):
        jax.debug.callback(self.note, row @ W)
        return row @ W @ W


def gradient_rule(f):
    """The callback runs in the rule of a custom derivative."""
    g = jax.custom_vjp(lambda row: row @ W)
    g.defvjp(lambda row: (f(row), row), lambda row, ct: (ct @ W.T + row,))
    return lambda row: sum(jax.value_and_grad(lambda row: jnp.sum(g(row)))(row))


STRUCTURES = {
    "vmap": lambda f: jax.vmap(f),
    "scan": lambda f: lambda x: lax.scan(lambda h, row: (f(h + row), None), x[0], x)[0],
    "while": lambda f: lambda x: lax.fori_loop(0, 2, lambda i, h: f(h), x[0]),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] < 9, f, lambda row: row, x[0]),
    "jit": lambda f: lambda x: jax.jit(f)(x[0]),
    "checkpoint": lambda f: lambda x: jax.checkpoint(f)(x[0]),
    "custom_vjp": lambda f: lambda x: gradient_rule(f)(x[0]),
}


@pytest.mark.parametrize("kind", ["pure", "io", "debug"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_callbacks_in_structures_see_declared_dtypes(structure, kind):
    plain, cast = Seen(), Seen()
    programs = [STRUCTURES[structure](getattr(seen, kind)) for seen in (plain, cast)]
    jaxpr = trace(half(programs[1]), X)
    assert "bfloat16" in {d for eqn in find(jaxpr, "dot_general") for d in dtypes(eqn.invars)}
    for eqn in find(jaxpr, "pure_callback", "io_callback", "debug_callback"):
        assert set(dtypes([*eqn.invars, *eqn.outvars])) == {"float32"}
    expected, found = jax.jit(programs[0])(X), jax.jit(half(programs[1]))(X)
    np.testing.assert_allclose(found, expected, atol=5e-2 * np.max(np.abs(expected)))
    jax.effects_barrier()
    assert cast.dtypes == plain.dtypes
    assert set(cast.dtypes) == {"float32"}


# --- Pallas ---------------------------------------------------------------------------------


def multiply_kernel(x_ref, y_ref, out_ref):
    out_ref[...] = x_ref[...] @ y_ref[...]


def multiply(x, y):
    shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    return pl.pallas_call(multiply_kernel, out_shape=shape, interpret=True)(x, y)


@jax.custom_vjp
def matmul(x, y):
    return multiply(x, y)


matmul.defvjp(
    lambda x, y: (multiply(x, y), (x, y)),
    lambda saved, ct: (multiply(ct, saved[1].T), multiply(saved[0].T, ct)),
)


@pytest.mark.parametrize("declared", ["float32", "bfloat16"])
def test_kernels_with_derivatives_of_their_own(declared):
    """Forward and backward kernels get what they declare, whatever is around them."""

    def loss(w, x):
        y = matmul((x @ w).astype(declared), w.astype(declared))
        return jnp.mean((y.astype(jnp.float32) @ w) ** 2)

    found = jax.jit(jax.grad(autocast(loss))).trace(W, X)
    kernels = find(found.jaxpr, "pallas_call")
    assert len(kernels) == 3
    for eqn in kernels:
        assert {*dtypes(eqn.invars), *dtypes(eqn.outvars)} == {declared}
        inside = find(eqn.params["jaxpr"], "dot_general")
        assert {d for dot in inside for d in dtypes(dot.invars)} == {declared}
    outside = {id(dot) for eqn in kernels for dot in find(eqn.params["jaxpr"], "dot_general")}
    dots = [eqn for eqn in find(found.jaxpr, "dot_general") if id(eqn) not in outside]
    assert {d for eqn in dots for d in dtypes(eqn.invars)} == {"float16"}
    value, expected = found.lower().compile()(W, X), jax.jit(jax.grad(loss))(W, X)
    np.testing.assert_allclose(value, expected, atol=2e-2 * np.max(np.abs(expected)))


# --- foreign functions --------------------------------------------------------------------------


def factor(a):
    """LAPACK's Cholesky of a symmetric matrix; it reads columns, so "U" is the lower triangle."""
    like = (jax.ShapeDtypeStruct(a.shape, a.dtype), jax.ShapeDtypeStruct((), jnp.int32))
    return jnp.tril(jax.ffi.ffi_call("lapack_spotrf_ffi", like)(a, uplo=np.uint8(ord("U")))[0])


def test_a_foreign_function_runs_on_float32_operands():
    positive = W @ W.T + 4 * np.eye(4, dtype=np.float32)
    jnp.linalg.cholesky(positive)  # JAX loads LAPACK when it compiles the first of its functions
    fn = lambda a: factor(a @ np.eye(4, dtype=np.float32)) @ W
    found = jax.jit(autocast(fn)).trace(positive)
    assert_dots_run_in("float16", found.jaxpr)
    (eqn,) = find(found.jaxpr, "ffi_call")
    assert dtypes([*eqn.invars, *eqn.outvars]) == ("float32", "float32", "int32")
    expected = np.linalg.cholesky(positive) @ W
    np.testing.assert_allclose(found.lower().compile()(positive), expected, atol=2e-2)
