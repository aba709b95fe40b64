"""Models of the digits: classifiers, an autoencoder, an embedding."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from . import data
from .layers import cross_entropy, dense, dense_params, mlp, mlp_params, to
from .programs import Program, Tree, plain

PIXELS = 64


class ResNet(nn.Module):
    """Two residual blocks with BatchNorm."""

    dtype: Any = None
    width: int = 8

    @nn.compact
    def __call__(self, images: jax.Array, training: bool) -> jax.Array:
        def conv(x: jax.Array, features: int, stride: int = 1) -> jax.Array:
            layer = nn.Conv(features, (3, 3), stride, use_bias=False, dtype=self.dtype)
            return nn.BatchNorm(not training, momentum=0.95, dtype=self.dtype)(layer(x))

        x = nn.relu(conv(images[..., None], self.width))
        x = nn.relu(x + conv(nn.relu(conv(x, self.width)), self.width))
        y = conv(nn.relu(conv(x, 2 * self.width, 2)), 2 * self.width)
        x = nn.relu(y + conv(x, 2 * self.width, 2))
        return nn.Dense(10, dtype=self.dtype)(jnp.mean(x, (1, 2)))


def resnet(dtype: Any) -> Program:
    """A ResNet; it is tested with the running statistics of its BatchNorms."""
    model = ResNet(dtype)

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        variables = model.init(key, jnp.zeros((1, 8, 8)), True)
        return variables["params"], variables["batch_stats"]

    def loss(params: Tree, state: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        variables = {"params": params, "batch_stats": state}
        logits, new = model.apply(variables, batch[0], True, mutable=["batch_stats"])
        return cross_entropy(logits, batch[1]), new["batch_stats"]

    def score(params: Tree, state: Tree, _: Tree) -> jax.Array:
        images, labels = map(jnp.asarray, data.digits(test=True))
        logits = model.apply({"params": params, "batch_stats": state}, images, False)
        return cross_entropy(logits, labels)

    return Program(init, lambda key: data.some_digits(key, 32), loss, score)


def moe(dtype: Any, width: int = 32, experts: int = 4) -> Program:
    """A classifier whose hidden layer is a mixture of experts, two for each image."""

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 5)
        stack = lambda key, *sizes: jax.vmap(lambda k: dense_params(k, *sizes)["kernel"])(
            jax.random.split(key, experts)
        )
        return {
            "inputs": dense_params(keys[0], PIXELS, width),
            "router": dense_params(keys[1], width, experts),
            "up": {"kernel": stack(keys[2], width, 2 * width)},
            "down": {"kernel": stack(keys[3], 2 * width, width)},
            "head": dense_params(keys[4], width, 10),
        }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        images, labels = batch
        x = jax.nn.gelu(dense(params["inputs"], images.reshape(-1, PIXELS), dtype))
        # The router decides in float32 (Switch Transformer, section 2.4).
        shares = jax.nn.softmax(dense(params["router"], x.astype(jnp.float32)))
        gates, chosen = jax.lax.top_k(shares, 2)
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        gates = jnp.einsum("nk,nke->ne", gates, jax.nn.one_hot(chosen, experts))
        hidden = jax.nn.gelu(jnp.einsum("nd,edh->neh", x, to(params["up"]["kernel"], dtype)))
        weighted = hidden * to(gates, dtype)[..., None]
        x = x + jnp.einsum("neh,ehd->nd", weighted, to(params["down"]["kernel"], dtype))
        load = jnp.mean(jax.nn.one_hot(chosen[:, 0], experts), axis=0)
        balance = experts * jnp.sum(load * jnp.mean(shares, axis=0))
        return cross_entropy(dense(params["head"], x, dtype), labels) + 0.01 * balance

    return plain(init, lambda key: data.some_digits(key, 64), loss)


def vae(dtype: Any, latent: int = 6) -> Program:
    """A variational autoencoder of Bernoulli pixels."""

    def init(key: jax.Array) -> Tree:
        encoder, decoder = jax.random.split(key)
        return {
            "encoder": mlp_params(encoder, (PIXELS, 64, 2 * latent)),
            "decoder": mlp_params(decoder, (latent, 64, PIXELS)),
        }

    def batch(key: jax.Array) -> Tree:
        first, second = jax.random.split(key)
        return data.some_digits(first, 64)[0], jax.random.normal(second, (64, latent))

    def loss(params: Tree, batch: Tree) -> jax.Array:
        images, noise = batch
        pixels = images.reshape(-1, PIXELS)
        encoded = mlp(params["encoder"], pixels, dtype).astype(jnp.float32)
        mean, log_variance = jnp.split(encoded, 2, axis=-1)
        z = mean + jnp.exp(log_variance / 2) * noise
        logits = mlp(params["decoder"], z, dtype).astype(jnp.float32)
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, pixels).sum(-1)
        divergence = 0.5 * jnp.sum(mean**2 + jnp.exp(log_variance) - log_variance - 1, axis=-1)
        return jnp.mean(reconstruction + divergence)

    return plain(init, batch, loss)


def contrastive(dtype: Any, count: int = 64, temperature: float = 0.1) -> Program:
    """An embedding in which two noisy views of a digit are close (InfoNCE)."""

    def init(key: jax.Array) -> Tree:
        return mlp_params(key, (PIXELS, 96, 32))

    def batch(key: jax.Array) -> jax.Array:
        first, second, third = jax.random.split(key, 3)
        pixels = data.some_digits(first, count)[0].reshape(count, PIXELS)
        views = jnp.stack([pixels, pixels])
        kept = jax.random.bernoulli(second, 0.7, views.shape)
        return kept * views + 0.1 * jax.random.normal(third, views.shape)

    def loss(params: Tree, views: jax.Array) -> jax.Array:
        z = mlp(params, views, dtype).astype(jnp.float32)
        z = to(z / jnp.linalg.norm(z, axis=-1, keepdims=True), dtype)
        logits = (z[0] @ z[1].T).astype(jnp.float32) / temperature
        labels = jnp.arange(count)
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    return plain(init, batch, loss)
