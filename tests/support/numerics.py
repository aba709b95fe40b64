"""Values of test programs: random trees, and how far an array is from its reference."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, **shapes):
    """A dict of float32 arrays of the standard normal distribution."""
    random = np.random.default_rng(seed)
    return {n: random.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


def draw(seed, *shape):
    """An array of NumPy: one of JAX would be traced at each call while leaks are checked."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def relative_error(found, expected):
    """The norm of the difference, as a part of the reference's norm."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)


def assert_trees_close(found, expected, tolerance):
    """Asserts that leaf by leaf the difference is at most a part of the largest element."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = np.max(np.abs(b), initial=1e-3)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def assert_trees_near(found, expected, tolerance):
    """Asserts equal structures, shapes and dtypes, and differences up to a part of the norm."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, a), b in leaves:
        if hasattr(b, "dtype"):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), path
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            assert np.linalg.norm(a - b) <= tolerance * (np.linalg.norm(b) + 0.03), path


def assert_second_derivatives_close(found, exact, w, x, limit):
    """Forward over reverse and reverse over reverse, by both arguments, of two scalar functions."""
    product = lambda fn: lambda w, x: jax.jvp(jax.grad(fn, (0, 1)), (w, x), (w, x))[1]
    reverse = lambda fn: jax.grad(lambda w, x: jnp.sum(jax.grad(fn)(w, x) ** 2), (0, 1))
    for derivative in (product, reverse):
        pair = [jax.jit(derivative(fn))(w, x) for fn in (found, exact)]
        for a, b in zip(*pair, strict=True):
            assert relative_error(a, b) < limit
