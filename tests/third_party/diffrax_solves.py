"""Diffrax, Optimistix and Lineax: differential equations, root finding, least squares."""

import diffrax
import jax.numpy as jnp
import lineax
import optimistix

from .program import Table

PROGRAMS = Table()
# A solver of equations that are computed in 16 bits cannot be asked for much more.
SOLVER = {"rtol": 1e-2, "atol": 1e-2}


@PROGRAMS.add(grad=(0, 1, 2), solver=SOLVER["rtol"])
def adaptive_steps(draw):
    """A neural ODE; its weights and start are differentiated."""

    def run(w, b, y):
        terms = diffrax.ODETerm(lambda t, y, p: jnp.tanh(y @ p[0] + p[1] * t) - 0.1 * y)
        adaptive = {"stepsize_controller": diffrax.PIDController(**SOLVER), "max_steps": 16}
        solver = diffrax.Bosh3()
        return diffrax.diffeqsolve(terms, solver, 0.0, 1.0, 0.25, y, (w, b), **adaptive).ys

    return run, (draw(6, 6, scale=0.35), draw(6), draw(2, 6))


@PROGRAMS.add(grad=(0, 1), solver=SOLVER["rtol"])
def root_find(draw):
    def run(w, x):
        residual = lambda z, args: jnp.tanh(args[0] @ z) + 2 * z - args[1]
        solver = optimistix.Newton(**SOLVER)
        return optimistix.root_find(residual, solver, jnp.zeros(6), (w, x)).value

    return run, (draw(6, 6, scale=0.35), draw(6))


@PROGRAMS.add(grad=(0, 1, 2))
def linear_solves(draw):
    def run(x, w, b):
        h = (x + jnp.tanh(x @ w)[:, :5] / 8) @ w
        spd = h @ h.T / 6 + jnp.eye(6)
        tagged = lineax.MatrixLinearOperator(spd, lineax.positive_semidefinite_tag)
        tall = lineax.MatrixLinearOperator(jnp.concatenate([h, jnp.eye(6)]))
        return (
            lineax.linear_solve(tagged, b, lineax.Cholesky()).value,
            lineax.linear_solve(tagged, b, lineax.CG(1e-5, 1e-5)).value,
            lineax.linear_solve(tall, jnp.concatenate([b, b]), lineax.QR()).value,
        )

    return run, (draw(6, 5), draw(5, 6), draw(6))
