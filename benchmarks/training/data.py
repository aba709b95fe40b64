"""Data that packages bring along: digits, text."""

from __future__ import annotations

import functools
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

CHARACTERS = 128


@functools.cache
def text() -> np.ndarray:
    """Returns the documentation that Python brings along: uint8 codes below `CHARACTERS`."""
    characters = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    return np.frombuffer(characters, np.uint8)


def windows(key: jax.Array, count: int, length: int) -> jax.Array:
    """Returns pieces of the text: int32[count, length]."""
    characters = jnp.asarray(text())
    starts = jax.random.randint(key, (count, 1), 0, characters.size - length)
    return characters[starts + jnp.arange(length)].astype(jnp.int32)


@functools.cache
def digits(test: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns images float32[n, 8, 8] within [0, 1] and labels int32[n]; every fifth is a test."""
    found = load_digits()
    chosen = (np.arange(len(found.target)) % 5 == 0) == test
    return (found.images[chosen] / 16).astype(np.float32), found.target[chosen].astype(np.int32)


def some_digits(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns training images and labels, drawn with replacement."""
    images, labels = map(jnp.asarray, digits())
    chosen = jax.random.randint(key, (count,), 0, len(labels))
    return images[chosen], labels[chosen]
