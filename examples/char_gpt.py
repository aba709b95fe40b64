"""A small GPT, its loss and its text. Nothing here knows of mixed precision.

The text is the language reference that Python's `help()` shows, half a megabyte that every Python
brings along.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax


class Block(nn.Module):
    """Causal self-attention and a feed-forward network."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width)(hidden)


class Gpt(nn.Module):
    """A GPT whose last layer shares its weights with the embedding of the characters."""

    vocabulary: int
    layers: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits (batch, context, vocabulary) of what follows each of the tokens."""
        embed = nn.Embed(self.vocabulary, self.width)
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (tokens.shape[-1], self.width)
        )
        x = embed(tokens) + positions
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Block(self.heads)(x, mask)
        return embed.attend(nn.LayerNorm()(x))


def make_loss(
    model: Gpt, weight: float = 1.0
) -> Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the loss of windows (batch, context + 1), which is the weight times a mean.

    The function also returns the mean: the cross entropy in nats per character.
    """

    def loss(params: Any, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.apply({"params": params}, windows[:, :-1])
        mean = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()
        return weight * mean, mean

    return loss


class Text(NamedTuple):
    """A text as numbers.

    Attributes:
        train: The first 90 %, int32.
        validation: The rest.
        vocabulary: How many different characters there are.
    """

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int

    def entropy(self) -> float:
        """Returns the loss of a model that knows only how frequent each character is."""
        shares = np.bincount(self.train) / len(self.train)
        return float(-np.sum(shares[shares > 0] * np.log(shares[shares > 0])))


def load_text() -> Text:
    """Returns the topics of Python's `help()`, in alphabetical order of their names."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    characters, tokens = np.unique(list(text), return_inverse=True)
    train, validation = np.split(tokens.astype(np.int32), [len(tokens) * 9 // 10])
    return Text(train, validation, len(characters))


def batch_at(text: np.ndarray, size: int, context: int, seed: int, step: int) -> np.ndarray:
    """Returns random windows (size, context + 1), the same ones for the same seed and step."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(len(text) - context, size=size)
    return text[starts[:, None] + np.arange(context + 1)]


def batches_in_order(text: np.ndarray, size: int, context: int) -> list[np.ndarray]:
    """Returns all full batches of windows (size, context + 1) that overlap by one character."""
    starts = np.arange(0, len(text) - context, context)
    windows = text[starts[:, None] + np.arange(context + 1)]
    return [windows[i : i + size] for i in range(0, len(windows) - size + 1, size)]
