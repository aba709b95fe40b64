"""Models of equations, and models that hold a gradient: neural ODE, PINN, MAML."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .layers import mlp, mlp_params
from .programs import Program, Tree, plain


def neural_ode(dtype: Any, steps: int = 10, dt: float = 0.2) -> Program:
    """Learns the field of a damped rotation from noisy trajectories, by Runge and Kutta."""
    field = jnp.array([[-0.1, 2.0], [-2.0, -0.1]])

    def solve(slope: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            a = slope(x)
            b = slope(x + dt / 2 * a)
            c = slope(x + dt / 2 * b)
            d = slope(x + dt * c)
            x = x + dt / 6 * (a + 2 * b + 2 * c + d)
            return x, x

        return jax.lax.scan(step, x, length=steps)[1]

    def init(key: jax.Array) -> Tree:
        return mlp_params(key, (2, 32, 2))

    def batch(key: jax.Array) -> Tree:
        first, second = jax.random.split(key)
        x = jax.random.normal(first, (32, 2))
        exact = solve(lambda x: (x**3 / (1 + x**2)) @ field, x)
        return x, exact + 0.05 * jax.random.normal(second, exact.shape)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x, observed = batch
        # The state is float32, and so is what the solver adds to it.
        found = solve(lambda x: mlp(params, x, dtype, jnp.tanh).astype(jnp.float32), x)
        return jnp.mean((found - observed) ** 2)

    return plain(init, batch, loss)


def pinn(dtype: Any) -> Program:
    """Solves ``u'' + u = (1 - 4 pi^2) sin(2 pi x)`` with ``u(0) = u(1) = 0`` by its residual."""
    frequency = 2 * jnp.pi

    def u(params: Tree, x: jax.Array) -> jax.Array:
        return mlp(params, x[None], dtype, jnp.tanh)[0].astype(jnp.float32)

    def init(key: jax.Array) -> Tree:
        return mlp_params(key, (1, 32, 32, 1))

    def loss(params: Tree, points: jax.Array) -> jax.Array:
        def residual(x: jax.Array) -> jax.Array:
            second = jax.grad(jax.grad(u, 1), 1)(params, x)
            return second + u(params, x) - (1 - frequency**2) * jnp.sin(frequency * x)

        ends = jax.vmap(u, (None, 0))(params, jnp.array([0.0, 1.0]))
        return jnp.mean(jax.vmap(residual)(points) ** 2) + 100 * jnp.sum(ends**2)

    def score(params: Tree, _: Tree) -> jax.Array:
        x = jnp.linspace(0.0, 1.0, 101)
        exact = jnp.sin(frequency * x)
        found = jax.vmap(u, (None, 0))(params, x)
        return jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)

    return plain(init, lambda key: jax.random.uniform(key, (64,)), loss, score)


def maml(dtype: Any, tasks: int = 16, shots: int = 10, inner_rate: float = 0.02) -> Program:
    """Learns to learn sines from ten points, by one step of gradient descent inside the loss."""

    def init(key: jax.Array) -> Tree:
        return mlp_params(key, (1, 40, 40, 1))

    def batch(key: jax.Array) -> Tree:
        first, second, third = jax.random.split(key, 3)
        x = jax.random.uniform(first, (tasks, 2, shots, 1), minval=-5.0, maxval=5.0)
        height = jax.random.uniform(second, (tasks, 1, 1, 1), minval=0.5, maxval=2.0)
        return x, height * jnp.sin(x + jnp.pi * jax.random.uniform(third, height.shape))

    def error(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((mlp(params, x, dtype, jax.nn.relu).astype(jnp.float32) - y) ** 2)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        def of_task(x: jax.Array, y: jax.Array) -> jax.Array:
            grads = jax.grad(error)(params, x[0], y[0])
            adapted = jax.tree.map(lambda p, g: p - inner_rate * g, params, grads)
            return error(adapted, x[1], y[1])

        return jnp.mean(jax.vmap(of_task)(*batch))

    return plain(init, batch, loss)
