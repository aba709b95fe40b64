"""Programs of scientists in float64, with their products in float32.

Tolerances are relative, and stated beside each program. The same programs in float32 throughout
are further off, or fail.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import Policy, op_stats

RNG = np.random.default_rng(0)
SINGLE = Policy("float32")
LEVELS = ["tensor_cores", "o1", "compute"]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def in_float32(tree):
    return jax.tree.map(lambda x: x.astype(np.float32), tree)


def error(found, exact):
    return float(jnp.linalg.norm(jnp.ravel(found - exact)) / jnp.linalg.norm(jnp.ravel(exact)))


def share_of_products(fn, *args):
    """The share of the FLOPs of matrix products whose operands are float32, in what runs."""
    products = [count for count in op_stats(fn, *args) if count.primitive == "dot_general"]
    low = sum(count.flops for count in products if count.operands == ("float32",))
    return low / sum(count.flops for count in products)


# --- a Gaussian process -----------------------------------------------------------------------


def log_likelihood(params, x, y):
    """The log marginal likelihood of a deep kernel: an RBF kernel of the features of a network."""
    z = jnp.tanh(x @ params["w"]) @ params["v"]
    apart = z[:, None] - z[None]
    kernel = jnp.exp(-0.5 * jnp.sum(apart**2, -1)) + params["noise"] ** 2 * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(kernel)
    alpha = jax.scipy.linalg.cho_solve((factor, True), y)
    return -0.5 * y @ alpha - jnp.sum(jnp.log(jnp.diagonal(factor)))


def process():
    x = RNG.standard_normal((48, 16))
    params = {
        "w": RNG.standard_normal((16, 256)) / 4,
        "v": RNG.standard_normal((256, 3)) / 8,
        "noise": np.float64(1e-4),
    }
    return params, x, np.sin(x[:, 0])
