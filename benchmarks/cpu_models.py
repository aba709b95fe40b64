"""The models of ``benchmarks/cpu.py`` beside those of `benchmarks.comparison.models`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.comparison.models import Mixed


class Mlp(Mixed):
    """Dense layers on images that are read as rows of numbers."""

    width: int = 1024
    layers: int = 4
    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.reshape(images.shape[0], -1)
        for _ in range(self.layers):
            x = nn.relu(self.layer(nn.Dense, self.width)(x))
        return self.layer(nn.Dense, self.classes)(x)


class Digits(Mixed):
    """The network of ``examples/train_digits.py``."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for features in (16, 32):
            x = self.layer(nn.Conv, features, (3, 3))(x)
            x = nn.relu(self.layer(nn.LayerNorm)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(self.layer(nn.Dense, 64)(x.reshape(x.shape[0], -1)))
        return self.layer(nn.Dense, 10)(x)


class _Convolutional(Mixed):
    """A network in inference: norms use the statistics that they have."""

    classes: int = 1000

    def convolved(
        self, x: jax.Array, features: int, size: int, by: int = 1, groups: int = 1
    ) -> Any:
        conv = self.layer(
            nn.Conv, features, (size, size), (by, by), feature_group_count=groups, use_bias=False
        )
        return self.layer(nn.BatchNorm, use_running_average=True)(conv(x))


class ResNet50(_Convolutional):
    """The network of bottleneck blocks."""

    stages: tuple[int, ...] = (3, 4, 6, 3)

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(self.convolved(images, 64, 7, 2))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.stages):
            features = 64 * 2**stage
            for block in range(blocks):
                by = 2 if stage and not block else 1
                y = nn.relu(self.convolved(x, features, 1))
                y = nn.relu(self.convolved(y, features, 3, by))
                y = self.convolved(y, 4 * features, 1)
                if x.shape != y.shape:
                    x = self.convolved(x, 4 * features, 1, by)
                x = nn.relu(x + y)
        return self.layer(nn.Dense, self.classes)(jnp.mean(x, (1, 2)))


class MobileNetV2(_Convolutional):
    """The network of inverted residuals: most of its windows see one channel."""

    stages: tuple[tuple[int, int, int, int], ...] = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu6(self.convolved(images, 32, 3, 2))
        for growth, features, blocks, first in self.stages:
            for block in range(blocks):
                by, inner = first if not block else 1, growth * x.shape[-1]
                y = nn.relu6(self.convolved(x, inner, 1)) if growth > 1 else x
                y = nn.relu6(self.convolved(y, inner, 3, by, groups=inner))
                y = self.convolved(y, features, 1)
                x = x + y if x.shape == y.shape else y
        x = nn.relu6(self.convolved(x, 1280, 1))
        return self.layer(nn.Dense, self.classes)(jnp.mean(x, (1, 2)))


class Decoding(Mixed):
    """A decoder that reads one token after the other, with a cache of keys and values."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        d, (n, t) = self.width, tokens.shape
        embedding = self.leaf("embedding", (self.vocabulary, d))
        shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        layers = [
            {name: self.leaf(f"{name}_{i}_kernel", shape) for name, shape in shapes.items()}
            for i in range(self.layers)
        ]
        cache = jnp.zeros((self.layers, 2, n, t, self.heads, d // self.heads), embedding.dtype)

        def step(cache: jax.Array, at: Any) -> tuple[jax.Array, jax.Array]:
            i, token = at
            x = embedding[token]
            for k, w in enumerate(layers):
                q, *new = jnp.split(_normed(x) @ w["qkv"], 3, -1)
                q, *new = (a.reshape(n, self.heads, -1) for a in (q, *new))
                cache = cache.at[k, :, :, i].set(jnp.stack(new))
                scores = jnp.einsum("nhd,nthd->nht", q, cache[k, 0]) / q.shape[-1] ** 0.5
                scores = jnp.where(jnp.arange(t) <= i, scores.astype(jnp.float32), -1e30)
                weights = jax.nn.softmax(scores).astype(x.dtype)
                x = x + jnp.einsum("nht,nthd->nhd", weights, cache[k, 1]).reshape(n, d) @ w["out"]
                x = x + nn.gelu(_normed(x) @ w["up"]) @ w["down"]
            return cache, _normed(x) @ embedding.T

        positions = jnp.arange(t), tokens.T
        return jnp.moveaxis(jax.lax.scan(step, cache, positions)[1], 0, 1)


def _normed(x: jax.Array) -> jax.Array:
    size = jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6)
    return (x / size).astype(x.dtype)
