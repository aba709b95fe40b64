"""How far results in 16 bits may be from those of float32.

The model: a program in 16 bits rounds its arguments, and at each later step it does what another
rounding of the arguments would have done, or rounds its result. So a result may be off by a few
times

    u * |result| + sqrt(mean over draws of |f(x + rounding of x) - f(x)|^2)

with u the unit roundoff of the compute dtype, and the draws made in float32. The second term is
large where the function is ill-conditioned, whoever computes it.
"""

import jax
import jax.numpy as jnp
import numpy as np

DRAWS = 3


def unit_roundoff(dtype):
    return float(jnp.finfo(dtype).eps) / 2


def rounded(tree, dtype):
    """The float32 values of a tree, rounded to ``dtype``."""
    low = lambda x: np.asarray(x).astype(dtype).astype(np.float32)
    return jax.tree.map(lambda x: low(x) if is_float32(x) else x, tree)


def perturbed(tree, dtype, rng):
    """The float32 values of a tree, each off by the unit roundoff up or down."""

    def leaf(x):
        if not is_float32(x):
            return x
        signs = rng.choice([-1.0, 1.0], size=x.shape)
        return np.asarray(x) * (1 + np.float32(unit_roundoff(dtype) * signs))

    return jax.tree.map(leaf, tree)


def is_float32(x):
    return x.dtype == jnp.float32


def norm(x):
    return np.linalg.norm(np.ravel(x))


def noise(run, args, dtype, exact):
    """The second term of the model for each result."""
    rng = np.random.default_rng(0)
    inputs = [rounded(args, dtype), *(perturbed(args, dtype, rng) for _ in range(DRAWS))]
    results = [jax.tree.leaves(run(*x)) for x in inputs]
    return [
        np.sqrt(np.mean([difference(r, e) ** 2 for r in leaf]))
        for *leaf, e in zip(*results, jax.tree.leaves(exact), strict=True)
    ]


def difference(x, y):
    """The norm of what two arrays differ by, where the second is finite."""
    finite = np.isfinite(y)
    return norm(np.where(finite, x, 0) - np.where(finite, y, 0))
