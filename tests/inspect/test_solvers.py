"""`op_stats` counts what runs inside a solver, and nothing that only its derivative calls."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import autocast, op_stats

SIZE = 16
MATRIX = jnp.eye(SIZE) + 0.01 * jax.random.normal(jax.random.key(0), (SIZE, SIZE))
RIGHT = jax.random.normal(jax.random.key(1), (SIZE,))


def counts_of(fn, *args):
    """The counts of one kind of equation, from its name."""
    return {count.primitive: count for count in op_stats(fn, *args)}


def test_a_direct_solver_counts_its_triangular_solves():
    found = counts_of(jnp.linalg.solve, MATRIX, RIGHT)
    assert found["triangular_solve"].times == 2
    # The products of `matvec`, which checks nothing and which only a derivative calls, do not run.
    assert "dot_general" not in found
    solver = found["custom_linear_solve"]
    assert (solver.times, solver.flops, solver.nbytes) == (1, 0, 0)


def test_its_gradient_counts_the_solver_of_the_transposed_system():
    found = counts_of(jax.grad(lambda a, b: jnp.sum(jnp.linalg.solve(a, b))), MATRIX, RIGHT)
    assert found["custom_linear_solve"].times == 2
    assert found["triangular_solve"].times == 4
    # The solver of the transposed system alone turns the permutation round.
    assert found["sort"].times == 1
    # The gradient of the matrix: an outer product.
    assert found["dot_general"].times == 1


def test_an_iterative_solver_counts_one_iteration():
    def solved(a, b):
        return jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, maxiter=50)[0]

    matvec = 2 * SIZE * SIZE
    inner = 2 * SIZE
    found = counts_of(autocast(solved, jnp.bfloat16), MATRIX @ MATRIX.T, RIGHT)
    # Of the residual at the start and of one iteration: two of `matvec`; an inner product of the
    # right-hand side, one of the first residual, and two of the iteration.
    assert found["dot_general"].times == 6
    assert found["dot_general"].flops == 2 * matvec + 4 * inner
    # The planner leaves a solver as the program declares it.
    assert found["dot_general"].operands == ("float32",)


def test_a_solver_in_a_loop_runs_as_often_as_the_loop():
    def steps(a, b):
        return lax.scan(lambda x, _: (jnp.linalg.solve(a, x), None), b, length=5)[0]

    assert counts_of(steps, MATRIX, RIGHT)["triangular_solve"].times == 10


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
    counts = op_stats(function, jax.ShapeDtypeStruct(shape, jnp.float32))
    found = next(c for c in counts if c.primitive in ("cholesky", "lu", "qr", "geqrf", "eigh"))
    assert found.flops == round(flops)


def test_a_triangular_solve_counts_each_right_hand_side_on_either_side():
    def solve(left_side):
        shape = (SIZE, 5) if left_side else (5, SIZE)
        right = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
        matrix = jax.ShapeDtypeStruct((2, SIZE, SIZE), jnp.float32)
        return counts_of(functools.partial(solved, left_side=left_side), matrix, right)

    def solved(a, b, left_side):
        return lax.linalg.triangular_solve(a, b, left_side=left_side, lower=True)

    for left_side in (True, False):
        assert solve(left_side)["triangular_solve"].flops == 2 * SIZE**2 * 5
