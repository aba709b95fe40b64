"""Programs of scientists in float64, with their products in float32.

Tolerances are relative, and stated beside each program. The same programs in float32 throughout
are further off, or fail.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import Policy, autocast, explain, op_stats

SINGLE = Policy("float32")
LEVELS = ["tensor_cores", "o1", "compute"]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def in_float32(tree):
    return jax.tree.map(lambda x: x.astype(np.float32), tree)


def error(found, exact):
    found, exact = (np.ravel(x).astype(np.float64) for x in (found, exact))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


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
    kernel = jnp.exp(-0.5 * jnp.sum(apart**2, -1)) + params["noise"] ** 2 * jnp.eye(
        len(x), dtype=x.dtype
    )
    factor = jnp.linalg.cholesky(kernel)
    alpha = jax.scipy.linalg.cho_solve((factor, True), y)
    return -0.5 * y @ alpha - jnp.sum(jnp.log(jnp.diagonal(factor)))


def process():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((48, 16))
    params = {
        "w": rng.standard_normal((16, 256)) / 4,
        "v": rng.standard_normal((256, 3)) / 64,
        "noise": np.float64(1e-3),
    }
    return params, x, np.sin(x[:, 0])


def test_a_gaussian_process():
    args = process()
    exact, gradient = jax.jit(jax.value_and_grad(log_likelihood))(*args)
    mixed = autocast(log_likelihood, policy=SINGLE, params=0)
    found, found_gradient = jax.jit(jax.value_and_grad(mixed))(*args)
    assert error(found, exact) < 1e-5
    assert max(jax.tree.leaves(jax.tree.map(error, found_gradient, gradient))) < 1e-4
    assert share_of_products(mixed, *args) > 0.99
    assert explain(mixed, *args).totals.low_share > 0.99
    # A kernel of condition 5e7 is not positive definite in float32.
    assert not error(jax.jit(log_likelihood)(*in_float32(args)), exact) < 1e-3


# --- molecular dynamics -------------------------------------------------------------------------


def pair_energy(squared):
    inverse = 1 / squared**3
    return 4 * (inverse * inverse - inverse)


def separations(positions):
    apart = positions[:, None] - positions[None]
    return apart, jnp.sum(apart**2, -1) + 1e9 * jnp.eye(len(positions), dtype=positions.dtype)


def energy(positions):
    return jnp.sum(pair_energy(separations(positions)[1])) / 2


def forces(positions):
    """The negative gradient of the energy, as a sum over pairs: a product of two arrays."""
    apart, squared = separations(positions)
    slope = jax.grad(lambda r: jnp.sum(pair_energy(r)))(squared)
    return -2 * jnp.einsum("ij,ijk->ik", slope, apart)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("origin", [0, 1000])
def test_a_lennard_jones_force(level, origin):
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 3), -1).reshape(-1, 3) * 1.2
    positions = grid + 0.05 * rng.standard_normal(grid.shape) + origin
    exact = -jax.jit(jax.grad(energy))(positions)
    mixed = autocast(forces, policy=SINGLE.with_level(level), params=None)
    assert error(jax.jit(mixed)(positions), exact) < 1e-6
    assert share_of_products(mixed, positions) == 1
    if origin:  # differences of positions far from the origin are lost in float32
        assert error(jax.jit(forces)(in_float32(positions)), exact) > 1e-4
