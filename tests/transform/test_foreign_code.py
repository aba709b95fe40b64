"""What leaves the program: callbacks under transformations, and foreign functions.

The order of callbacks is in `test_structural_metadata.py`; kernels of Pallas are in
`test_only_the_rule.py` and `test_kernels.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jmp_autocast import autocast
from tests.support.jaxprs import assert_dots_run_in, dtypes, find, trace

W = np.random.default_rng(0).standard_normal((8, 8), np.float32) / 3
X = np.random.default_rng(1).standard_normal((3, 8), np.float32)
LIKE = jax.ShapeDtypeStruct((8,), jnp.float32)

half = functools.partial(autocast, policy=jnp.bfloat16)


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


# --- foreign functions --------------------------------------------------------------------------


def factor(a):
    """LAPACK's Cholesky of a symmetric matrix; it reads columns, so "U" is the lower triangle."""
    like = (jax.ShapeDtypeStruct(a.shape, a.dtype), jax.ShapeDtypeStruct((), jnp.int32))
    return jnp.tril(jax.ffi.ffi_call("lapack_spotrf_ffi", like)(a, uplo=np.uint8(ord("U")))[0])


def test_a_foreign_function_runs_on_float32_operands():
    positive = W @ W.T + 4 * np.eye(8, dtype=np.float32)
    jnp.linalg.cholesky(positive)  # JAX loads LAPACK when it compiles the first of its functions
    fn = lambda a: factor(a @ np.eye(8, dtype=np.float32)) @ W
    found = jax.jit(autocast(fn)).trace(positive)
    assert_dots_run_in("bfloat16", found.jaxpr)
    (eqn,) = find(found.jaxpr, "ffi_call")
    assert dtypes([*eqn.invars, *eqn.outvars]) == ("float32", "float32", "int32")
    expected = np.linalg.cholesky(positive) @ W
    np.testing.assert_allclose(found.lower().compile()(positive), expected, atol=2e-2)
