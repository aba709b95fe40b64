"""Diffrax, Optimistix and Lineax: differential equations, root finding, least squares."""

import diffrax
import jax
import jax.numpy as jnp
import lineax
import optimistix

from .program import Program, Table

PROGRAMS = Table()
# A solver of equations that are computed in 16 bits cannot be asked for much more.
SOLVER = {"rtol": 1e-2, "atol": 1e-2}


def field(t, y, args):
    w, b = args
    return jnp.tanh(y @ w + b * t) - 0.1 * y


def solve(stepper, solver=0, **options):
    """A neural ODE; its weights and start are differentiated."""

    def run(w, b, y):
        terms = diffrax.ODETerm(field)
        return diffrax.diffeqsolve(
            terms, stepper, 0.0, 1.0, 0.25, y, (w, b), max_steps=16, **options
        ).ys

    return Program(
        lambda draw: (run, (draw(6, 6, scale=0.35), draw(6), draw(2, 6))), (0, 1, 2), solver=solver
    )


PROGRAMS |= {
    "backsolve adjoint": solve(diffrax.Midpoint(), adjoint=diffrax.BacksolveAdjoint()),
    "adaptive steps": solve(
        diffrax.Bosh3(), SOLVER["rtol"], stepsize_controller=diffrax.PIDController(**SOLVER)
    ),
}


@PROGRAMS.add(grad=(0, 1), solver=SOLVER["rtol"])
def implicit_euler(draw):
    """A stiff equation: Newton's method and linear solves in each step."""

    def run(w, y):
        stiff = lambda t, y, w: -5 * y + jnp.tanh(y @ w)
        solver = diffrax.ImplicitEuler(root_finder=diffrax.VeryChord(**SOLVER))
        return diffrax.diffeqsolve(
            diffrax.ODETerm(stiff), solver, 0.0, 0.5, 0.25, y, w, max_steps=4
        ).ys

    return run, (draw(6, 6, scale=0.35), draw(6))


@PROGRAMS.add(grad=(0, 1))
def stochastic_equation(draw):
    """A neural SDE along a fixed Brownian path."""

    def run(w, y, key):
        path = diffrax.VirtualBrownianTree(0.0, 1.0, 0.1, (6,), key)
        drift = diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w))
        noise = diffrax.ControlTerm(lambda t, y, w: jnp.diag(jnp.cos(y) / 4), path)
        terms = diffrax.MultiTerm(drift, noise)
        return diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.25, y, w, max_steps=5).ys

    return run, (draw(6, 6, scale=0.35), draw(6), jax.random.key(0))


@PROGRAMS.add(grad=(0, 1), solver=SOLVER["rtol"])
def root_find(draw):
    def run(w, x):
        residual = lambda z, args: jnp.tanh(args[0] @ z) + 2 * z - args[1]
        solver = optimistix.Newton(**SOLVER)
        return optimistix.root_find(residual, solver, jnp.zeros(6), (w, x)).value

    return run, (draw(6, 6, scale=0.35), draw(6))


@PROGRAMS.add(grad=(0, 1), solver=SOLVER["rtol"])
def least_squares(draw):
    def run(x, y):
        residuals = lambda z, args: jnp.tanh(args[0] @ z) - jnp.tanh(args[1])
        solver = optimistix.LevenbergMarquardt(**SOLVER)
        return optimistix.least_squares(residuals, solver, jnp.zeros(5), (x, y)).value

    return run, (draw(9, 5), draw(9, scale=0.3))


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
