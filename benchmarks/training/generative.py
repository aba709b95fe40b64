"""Models of a distribution: points of the plane, digits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from . import data
from .layers import mlp, mlp_params
from .programs import Program, Tree, plain


def moons(key: jax.Array, count: int) -> jax.Array:
    """Returns points of two noisy half circles: float32[count, 2]."""
    first, second, third = jax.random.split(key, 3)
    angle = jnp.pi * jax.random.uniform(first, (count,))
    upper = jax.random.bernoulli(second, 0.5, (count,))
    x = jnp.where(upper, jnp.cos(angle), 1 - jnp.cos(angle)) - 0.5
    y = jnp.where(upper, jnp.sin(angle), 0.5 - jnp.sin(angle)) - 0.25
    return jnp.stack([x, y], axis=-1) + 0.1 * jax.random.normal(third, (count, 2))


def energy_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the energy distance of two samples float[n, d], without bias."""

    def mean(a: jax.Array, b: jax.Array, pairs: int) -> jax.Array:
        return jnp.sum(jnp.sqrt(jnp.sum((a[:, None] - b) ** 2, axis=-1) + 1e-12)) / pairs

    n = len(x)
    within = n * (n - 1)
    return 2 * mean(x, y, n * n) - mean(x, x, within) - mean(y, y, within)


def gan(dtype: Any, count: int = 128, latent: int = 4) -> Program:
    """A GAN of points, with a penalty on the discriminator's gradient at the data (R1)."""
    wide = jax.nn.leaky_relu

    def init(key: jax.Array) -> Tree:
        generator, discriminator = jax.random.split(key)
        return {
            "generator": mlp_params(generator, (latent, 48, 48, 2)),
            "discriminator": mlp_params(discriminator, (2, 48, 48, 1)),
        }

    def batch(key: jax.Array) -> Tree:
        first, second = jax.random.split(key)
        return moons(first, count), jax.random.normal(second, (count, latent))

    def generate(params: Tree, noise: jax.Array) -> jax.Array:
        return mlp(params["generator"], noise, dtype, wide).astype(jnp.float32)

    def judge(discriminator: Tree, points: jax.Array) -> jax.Array:
        return mlp(discriminator, points, dtype, wide)[..., 0].astype(jnp.float32)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        """Both players' losses: each is constant in what the other one moves."""
        real, noise = batch
        fake, judges = generate(params, noise), params["discriminator"]
        slopes = jax.vmap(jax.grad(judge, 1), (None, 0))(judges, real)
        penalty = jnp.mean(jnp.sum(slopes**2, axis=-1))
        judged = jax.nn.softplus(-judge(judges, real)) + jax.nn.softplus(
            judge(judges, jax.lax.stop_gradient(fake))
        )
        fooled = jax.nn.softplus(-judge(jax.lax.stop_gradient(judges), fake))
        return jnp.mean(judged) + 0.5 * penalty + jnp.mean(fooled)

    def score(params: Tree, batch: Tree) -> jax.Array:
        first, second = jax.random.split(jax.random.key(1))
        noise = jax.random.normal(first, (1000, latent))
        return energy_distance(generate(params, noise), moons(second, 1000))

    return plain(init, batch, loss, score)


def ddpm(dtype: Any, count: int = 64, features: int = 16) -> Program:
    """A diffusion model of digits, which predicts the noise."""

    def init(key: jax.Array) -> Tree:
        return mlp_params(key, (64 + 2 * features, 96, 96, 64))

    def batch(key: jax.Array) -> Tree:
        first, second, third = jax.random.split(key, 3)
        images = 2 * data.some_digits(first, count)[0].reshape(count, 64) - 1
        times = jax.random.uniform(second, (count, 1), minval=0.02, maxval=0.98)
        return images, times, jax.random.normal(third, images.shape)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        images, times, noise = batch
        signal, spread = jnp.cos(times * jnp.pi / 2), jnp.sin(times * jnp.pi / 2)
        angles = 100 * times * 100.0 ** (-jnp.arange(features) / features)
        inputs = [signal * images + spread * noise, jnp.sin(angles), jnp.cos(angles)]
        predicted = mlp(params, jnp.concatenate(inputs, axis=-1), dtype).astype(jnp.float32)
        return jnp.mean((predicted - noise) ** 2)

    return plain(init, batch, loss)


def flow(dtype: Any, couplings: int = 4) -> Program:
    """A normalizing flow of affine couplings (RealNVP): the mean negative log likelihood."""

    def init(key: jax.Array) -> Tree:
        return [mlp_params(k, (1, 32, 32, 2)) for k in jax.random.split(key, couplings)]

    def loss(params: Tree, points: jax.Array) -> jax.Array:
        a, b = points[:, :1], points[:, 1:]
        log_det = jnp.zeros(len(points))
        for layer in params:
            moved = mlp(layer, a, dtype).astype(jnp.float32)
            log_scale, shift = 2 * jnp.tanh(moved[:, :1] / 2), moved[:, 1:]
            a, b = b * jnp.exp(log_scale) + shift, a
            log_det += log_scale[:, 0]
        log_density = -0.5 * (a[:, 0] ** 2 + b[:, 0] ** 2) - jnp.log(2 * jnp.pi)
        return -jnp.mean(log_density + log_det)

    return plain(init, lambda key: moons(key, 128), loss)
