"""The four models, each written once: ``dtype`` is threaded through as Flax practice does it.

With ``dtype=None`` a model has no precision of its own: float32 parameters give float32. With a
16-bit ``dtype`` it is the hand-written mixed precision that everything else is compared with:
parameters stay float32, norms return 16 bits and take their statistics in float32 (Flax's own
default), the softmax of attention runs in float32, and so does the loss.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Mixed(nn.Module):
    """A module with a compute dtype and a dtype for its parameters."""

    dtype: Any = None
    param_dtype: Any = jnp.float32

    def layer(self, layer: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        """Builds a layer of the module's dtypes."""
        return layer(*args, dtype=self.dtype, param_dtype=self.param_dtype, **kwargs)

    def leaf(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """Returns a parameter of its own, in the compute dtype."""
        value = self.param(name, nn.initializers.normal(0.02), shape, self.param_dtype)
        return value if self.dtype is None else value.astype(self.dtype)


class Attention(Mixed):
    """Multi-head self-attention."""

    heads: int = 4
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        n, t, width = x.shape
        qkv = self.layer(nn.Dense, 3 * width)(x)
        q, k, v = jnp.split(qkv.reshape(n, t, self.heads, -1), 3, axis=-1)
        scores = jnp.einsum("nqhd,nkhd->nhqk", q / (q.shape[-1] ** 0.5), k)
        if self.causal:
            lowest = jnp.finfo(scores.dtype).min
            scores = jnp.where(jnp.tri(t, dtype=bool), scores, lowest)
        if self.dtype is None:
            weights = jax.nn.softmax(scores)
        else:
            weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(self.dtype)
        mixed = jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(n, t, width)
        return self.layer(nn.Dense, width)(mixed)


class Block(Mixed):
    """A pre-norm transformer block."""

    heads: int = 4
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.layer(nn.LayerNorm)(x)
        x = x + self.layer(Attention, heads=self.heads, causal=self.causal)(h)
        h = self.layer(nn.LayerNorm)(x)
        h = nn.gelu(self.layer(nn.Dense, 4 * x.shape[-1])(h))
        return x + self.layer(nn.Dense, x.shape[-1])(h)


class Gpt(Mixed):
    """A decoder whose output layer is the token embedding."""

    layers: int = 12
    width: int = 128
    heads: int = 4
    vocabulary: int = 1000

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = self.layer(nn.Embed, self.vocabulary, self.width)
        x = embed(tokens) + self.leaf("pos_embedding", (tokens.shape[1], self.width))
        for _ in range(self.layers):
            x = self.layer(Block, heads=self.heads, causal=True)(x)
        return embed.attend(self.layer(nn.LayerNorm)(x))


class Vit(Mixed):
    """A vision transformer with a class token."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    patch: int = 4
    classes: int = 100

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (self.patch, self.patch)
        x = self.layer(nn.Conv, self.width, patch, strides=patch)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        first = jnp.broadcast_to(
            self.leaf("cls_embedding", (1, 1, self.width)), (x.shape[0], 1, self.width)
        )
        x = jnp.concatenate([first, x], axis=1)
        x = x + self.leaf("pos_embedding", (1, x.shape[1], self.width))
        for _ in range(self.layers):
            x = self.layer(Block, heads=self.heads)(x)
        return self.layer(nn.Dense, self.classes)(self.layer(nn.LayerNorm)(x)[:, 0])


class ResNet(Mixed):
    """A residual network of basic blocks, in training mode."""

    stages: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 16
    classes: int = 100

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        conv = functools.partial(self.layer, nn.Conv, use_bias=False)
        norm = functools.partial(self.layer, nn.BatchNorm, use_running_average=False)
        x = nn.relu(norm()(conv(self.width, (3, 3))(images)))
        for stage, blocks in enumerate(self.stages):
            features = self.width * 2**stage
            for block in range(blocks):
                strides = (2, 2) if stage and not block else (1, 1)
                y = nn.relu(norm()(conv(features, (3, 3), strides=strides)(x)))
                y = norm(scale_init=nn.initializers.zeros)(conv(features, (3, 3))(y))
                if x.shape != y.shape:
                    x = norm()(conv(features, (1, 1), strides=strides)(x))
                x = nn.relu(x + y)
        return self.layer(nn.Dense, self.classes)(jnp.mean(x, (1, 2)))


class Lstm(Mixed):
    """A language model of stacked LSTM layers, each one loop over the positions."""

    layers: int = 2
    width: int = 128
    vocabulary: int = 1000

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.layer(nn.Embed, self.vocabulary, self.width)(tokens)
        for _ in range(self.layers):
            x = nn.RNN(self.layer(nn.OptimizedLSTMCell, self.width))(x)
        return self.layer(nn.Dense, self.vocabulary)(x)
