"""The FLOPs of factorizations and of triangular solves."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import explain

SIZE = 16


def flops_of(fn, *args):
    """The FLOPs of one kind of equation, from its name."""
    return {row.primitive: row.flops for row in explain(fn, *args).rows}


@pytest.mark.parametrize(
    ("function", "shape", "flops"),
    [
        (jnp.linalg.cholesky, (3, SIZE, SIZE), 3 * SIZE**3 / 3),
        (jax.scipy.linalg.lu_factor, (SIZE, SIZE), 2 * SIZE**3 / 3),
        (jnp.linalg.qr, (32, SIZE), 2 * 32 * SIZE**2 - 2 * SIZE**3 / 3),
        (jnp.linalg.qr, (SIZE, 32), 2 * 32 * SIZE**2 - 2 * SIZE**3 / 3),
        (jnp.linalg.eigh, (SIZE, SIZE), 9 * SIZE**3),
    ],
)
def test_a_factorization_counts_what_its_algorithm_takes(function, shape, flops):
    found = flops_of(function, jax.ShapeDtypeStruct(shape, jnp.float32))
    names = found.keys() & {"cholesky", "lu", "qr", "geqrf", "eigh"}
    assert [found[name] for name in names] == [round(flops)]


def test_a_triangular_solve_counts_each_right_hand_side_on_either_side():
    def solve(left_side):
        shape = (SIZE, 5) if left_side else (5, SIZE)
        right = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
        matrix = jax.ShapeDtypeStruct((2, SIZE, SIZE), jnp.float32)
        return flops_of(functools.partial(solved, left_side=left_side), matrix, right)

    def solved(a, b, left_side):
        return lax.linalg.triangular_solve(a, b, left_side=left_side, lower=True)

    for left_side in (True, False):
        assert solve(left_side)["triangular_solve"] == 2 * SIZE**2 * 5
