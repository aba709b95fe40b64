"""Loops, solvers and recurrences: jax.lax, jax.experimental.ode, and optax's own loops."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.ode import odeint

from .program import Program, Table

PROGRAMS = Table()
ODE = 1e-3


def of_arrays(fn, *shapes, **options):
    def build(draw):
        return fn, tuple(draw(*shape, scale=0.5) for shape in shapes)

    return Program(build, **{"grad": tuple(range(len(shapes))), **options})


def ode(w, b, y):
    """A neural ODE, with JAX's adaptive solver and its adjoint."""

    def field(y, t, w, b):
        return jnp.tanh(y @ w + b * t) - 0.1 * y

    return odeint(field, y, jnp.linspace(0.0, 1.0, 3), w, b, rtol=ODE, atol=ODE)


def fixed_point(w, x):
    """A deep equilibrium layer: the fixed point by iteration, its derivative by `custom_root`."""
    x = x @ w

    def residual(z):
        return jnp.tanh(z @ w * 0.25 + x) - z

    def solve(f, z):
        return lax.while_loop(
            lambda s: (s[0] < 30) & (jnp.abs(f(s[1])).max() > 1e-5),
            lambda s: (s[0] + 1, s[1] + f(s[1])),
            (0, z),
        )[1]

    def tangent_solve(g, y):
        matrix = jax.jacobian(g)(jnp.zeros_like(y)).reshape(y.size, y.size)
        return jnp.linalg.solve(matrix, y.ravel()).reshape(y.shape)

    return lax.custom_root(residual, jnp.zeros_like(x), solve, tangent_solve)


def linear_recurrence(x, w_in, w_out, decay):
    """A state space layer: an associative scan."""
    u = x @ w_in
    a = jnp.broadcast_to(jax.nn.sigmoid(decay), u.shape)
    combine = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
    return lax.associative_scan(combine, (a, u), axis=1)[1] @ w_out


def physics_informed(w, v, t):
    """The residual of a differential equation of a network: derivatives to the inputs."""

    def network(t):
        return jnp.tanh(jnp.tanh(t[None] * w) @ v)[0]

    residual = jax.vmap(lambda t: jax.grad(jax.grad(network))(t) + network(t))(t)
    return jnp.mean(residual**2), jax.vmap(network)(t)


def adam_in_a_scan(w, x):
    """Steps of an optimizer of optax, differentiated through its state."""
    objective = lambda z: jnp.sum((jnp.tanh(x @ z) - 0.3) ** 2) + 0.1 * jnp.sum(z**2)
    tx = optax.adam(0.1)

    def step(carry, _):
        z, state = carry
        value, grad = jax.value_and_grad(objective)(z)
        updates, state = tx.update(grad, state, z)
        return (optax.apply_updates(z, updates), state), value

    (z, _), values = lax.scan(step, (w, tx.init(w)), None, length=3)
    return z, values


PROGRAMS |= {
    "odeint": of_arrays(ode, (6, 6), (6,), (2, 6), solver=ODE),
    "custom root": of_arrays(fixed_point, (6, 6), (6,)),
    "associative scan": of_arrays(linear_recurrence, (2, 6, 6), (6, 5), (5, 2), (5,)),
    "physics-informed network": of_arrays(physics_informed, (1, 6), (6,), (5,)),
    "adam in a scan": of_arrays(adam_in_a_scan, (6,), (5, 6)),
}
