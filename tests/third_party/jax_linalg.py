"""jax.numpy.linalg, jax.scipy.linalg, jax.lax.linalg and jax.scipy.sparse.linalg.

Each takes a matrix that a matmul of activations and weights made.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import linalg

from .program import Program, Table

PROGRAMS = Table()


def of_matrices(fn, *shapes, rows=6, batch=(), **options):
    """A program ``fn(h @ w, *others)`` with arrays of these shapes; all are differentiated.

    Where ``fn`` decomposes a matrix its product is in float32, and that of the layer in 16 bits.
    """

    def run(x, w, *others):
        return fn((x + jnp.tanh(x @ w) / 8) @ w, *others)

    def build(draw):
        # Far from singular, and with singular values that are far from one another.
        x = draw(*batch, rows, 6, scale=0.3) + jnp.eye(rows, 6) * jnp.arange(2.0, 8.0)
        return run, (x, jnp.eye(6) + draw(6, 6, scale=0.1), *(draw(*shape) for shape in shapes))

    return Program(build, **{"grad": tuple(range(2 + len(shapes))), **options})


def gram(h):
    return h @ jnp.swapaxes(h, -1, -2) / h.shape[-1] + jnp.eye(h.shape[-2])


def symmetric(x):
    return (x + jnp.swapaxes(x, -1, -2)) / 2


def whitened(h, y):
    return linalg.solve_triangular(jnp.linalg.cholesky(gram(h)), y, lower=True)


def spectrum(h):
    values, vectors = jnp.linalg.eigh(symmetric(h))
    return values, jnp.einsum("ik,k,jk->ij", vectors, jnp.sqrt(jnp.abs(values)), vectors)


def low_rank(h):
    u, s, vt = jnp.linalg.svd(h, full_matrices=False)
    return u[:, :5] * s[:5] @ vt[:5]


def conjugate_gradient(h, b):
    return jax.scipy.sparse.linalg.cg(lambda x: h @ (h.T @ x) / 4 + x, b, maxiter=20)[0]


def tridiagonal(h, b):
    edge = jnp.array([0.0, 1, 1, 1, 1, 1])
    lower, upper = h[0] * edge / 4, h[1] * edge[::-1] / 4
    return lax.linalg.tridiagonal_solve(lower, 3 + jnp.tanh(h[2]), upper, b)


PROGRAMS |= {
    "slogdet": of_matrices(lambda h: jnp.linalg.slogdet(gram(h))[1], batch=(2,)),
    "cholesky and solve triangular": of_matrices(whitened, (2, 6, 2), batch=(2,)),
    "eigh": of_matrices(spectrum),
    "svd": of_matrices(low_rank, rows=7),
    "solve": of_matrices(jnp.linalg.solve, (2, 6, 3), batch=(2,)),
    "qr": of_matrices(lambda h: jnp.linalg.qr(h)[0], rows=7),
    "pinv": of_matrices(jnp.linalg.pinv, rows=7),
    "det and inv": of_matrices(lambda h: (jnp.linalg.det(h), jnp.linalg.inv(h))),
    "matrix power and norms": of_matrices(
        lambda h: (jnp.linalg.matrix_power(h / 4, 3), jnp.linalg.norm(h, axis=(-2, -1)))
    ),
    "multi dot": of_matrices(lambda a, b, c: jnp.linalg.multi_dot([a, b, c]), (6, 5), (5, 5)),
    "expm": of_matrices(lambda h: linalg.expm(h / 4)),
    "lu solve": of_matrices(lambda h, b: linalg.lu_solve(linalg.lu_factor(h), b, trans=1), (6, 2)),
    "conjugate gradient": of_matrices(conjugate_gradient, (6,)),
    "tridiagonal solve": of_matrices(tridiagonal, (6, 2)),
}
