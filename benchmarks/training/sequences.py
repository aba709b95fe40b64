"""Models of sequences: text, rows of pixels, frames."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from . import data
from .layers import cross_entropy, dense, dense_params, mlp, mlp_params, to
from .programs import Program, Tree, plain


def rotated(x: jax.Array) -> jax.Array:
    """Rotary embedding (RoPE) of float[n, t, heads, d], computed in float32."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 100.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Transformer(nn.Module):
    """A decoder with rotary embeddings and gated feed-forward layers."""

    dtype: Any = None
    layers: int = 1
    width: int = 48
    heads: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        n, t = tokens.shape
        x = nn.Embed(data.CHARACTERS, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            h = nn.RMSNorm(dtype=self.dtype)(x)
            qkv = nn.Dense(3 * self.width, use_bias=False, dtype=self.dtype)(h)
            q, k, v = jnp.split(qkv.reshape(n, t, self.heads, -1), 3, axis=-1)
            scores = jnp.einsum("nqhd,nkhd->nhqk", rotated(q), rotated(k)) / q.shape[-1] ** 0.5
            scores = jnp.where(jnp.tri(t, dtype=bool), scores.astype(jnp.float32), -1e9)
            weights = to(jax.nn.softmax(scores), self.dtype)
            mixed = jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(n, t, self.width)
            x = x + nn.Dense(self.width, use_bias=False, dtype=self.dtype)(mixed)
            h = nn.RMSNorm(dtype=self.dtype)(x)
            gate = nn.silu(nn.Dense(2 * self.width, dtype=self.dtype)(h))
            up = nn.Dense(2 * self.width, dtype=self.dtype)(h)
            x = x + nn.Dense(self.width, dtype=self.dtype)(gate * up)
        return nn.Dense(data.CHARACTERS, dtype=self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))


class Lstm(nn.Module):
    """A language model of one LSTM layer."""

    dtype: Any = None
    width: int = 64

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(data.CHARACTERS, self.width, dtype=self.dtype)(tokens)
        x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(data.CHARACTERS, dtype=self.dtype)(x)


def language_model(model: nn.Module, count: int, length: int) -> Program:
    """Returns the program that predicts the next character."""

    def init(key: jax.Array) -> Tree:
        return model.init(key, jnp.zeros((1, length), jnp.int32))["params"]

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    return plain(init, lambda key: data.windows(key, count, length + 1), loss)


def transformer(dtype: Any) -> Program:
    """A character transformer."""
    return language_model(Transformer(dtype), count=8, length=32)


def lstm(dtype: Any) -> Program:
    """A character LSTM."""
    return language_model(Lstm(dtype), count=16, length=16)


def gru(dtype: Any, width: int = 48) -> Program:
    """A GRU written as a scan, which reads the rows of a digit."""

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 3)
        return {
            "inputs": dense_params(keys[0], 8, 3 * width),
            "hidden": dense_params(keys[1], width, 3 * width),
            "head": dense_params(keys[2], width, 10),
        }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        images, labels = batch

        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            reset, update, new = jnp.split(dense(params["inputs"], x, dtype), 3, axis=-1)
            h_reset, h_update, h_new = jnp.split(dense(params["hidden"], h, dtype), 3, axis=-1)
            z = jax.nn.sigmoid(update + h_update)
            new = jnp.tanh(new + jax.nn.sigmoid(reset + h_reset) * h_new)
            return (1 - z) * new + z * h, None  # the state stays float32, as Flax keeps it

        h, _ = jax.lax.scan(step, jnp.zeros((len(images), width)), jnp.moveaxis(images, 1, 0))
        return cross_entropy(dense(params["head"], h, dtype), labels)

    return plain(init, lambda key: data.some_digits(key, 64), loss)


def ctc(dtype: Any, symbols: int = 5, length: int = 3, frames: int = 10) -> Program:
    """Recognizes symbols of unknown duration in noisy frames, with the CTC loss."""
    width, reach, features = 48, 2, 8
    patterns = jax.random.normal(jax.random.key(1), (symbols + 1, features))

    def init(key: jax.Array) -> Tree:
        return mlp_params(key, ((2 * reach + 1) * features, width, width, symbols + 1))

    def batch(key: jax.Array, count: int = 32) -> Tree:
        first, second, third = jax.random.split(key, 3)
        labels = jax.random.randint(first, (count, length), 1, symbols + 1)  # 0 is the blank
        ends = jnp.sort(jax.random.uniform(second, (count, length, 1)), axis=1) * frames
        position = jnp.sum(ends < jnp.arange(frames), axis=1)
        spoken = jnp.pad(labels, ((0, 0), (1, 0)))
        sounds = patterns[jnp.take_along_axis(spoken, position, axis=1)]
        return sounds + 0.5 * jax.random.normal(third, sounds.shape), labels

    def loss(params: Tree, batch: Tree) -> jax.Array:
        sounds, labels = batch
        padded = jnp.pad(sounds, ((0, 0), (reach, reach), (0, 0)))
        near = [padded[:, i : i + frames] for i in range(2 * reach + 1)]
        logits = mlp(params, jnp.concatenate(near, axis=-1), dtype)
        nowhere = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)  # no padding
        return optax.ctc_loss(logits.astype(jnp.float32), nowhere[0], labels, nowhere[1]).mean()

    return plain(init, batch, loss)
