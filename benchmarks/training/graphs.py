"""A graph network that sums messages with ``segment_sum``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .layers import cross_entropy, dense, dense_params, to
from .programs import Program, Tree, plain


def communities(dtype: Any, nodes: int = 64, edges: int = 512, groups: int = 4) -> Program:
    """Finds the groups of a random graph, whose edges are mostly within a group."""
    width, features = 32, 8
    patterns = jax.random.normal(jax.random.key(1), (groups, features))

    def init(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 6)
        rounds = [
            {"message": dense_params(a, width, width), "update": dense_params(b, 2 * width, width)}
            for a, b in (keys[:2], keys[2:4])
        ]
        return {
            "inputs": dense_params(keys[4], features, width),
            "rounds": rounds,
            "head": dense_params(keys[5], width, groups),
        }

    def batch(key: jax.Array) -> Tree:
        keys = jax.random.split(key, 4)
        labels = jnp.arange(nodes) % groups
        senders = jax.random.randint(keys[0], (edges,), 0, nodes)
        hops = jax.random.randint(keys[1], (edges,), 0, nodes // groups) * groups
        strays = jax.random.bernoulli(keys[2], 0.3, (edges,))
        receivers = (senders + jnp.where(strays, hops // groups, hops)) % nodes
        noise = jax.random.normal(keys[3], (nodes, features))
        return patterns[labels] + 2 * noise, senders, receivers, labels

    def loss(params: Tree, batch: Tree) -> jax.Array:
        inputs, senders, receivers, labels = batch
        x = jax.nn.relu(dense(params["inputs"], inputs, dtype))
        degree = jax.ops.segment_sum(jnp.ones(edges), receivers, nodes)
        for layer in params["rounds"]:
            messages = jax.nn.relu(dense(layer["message"], x, dtype))[senders]
            # Sums over the edges are taken in float32.
            summed = jax.ops.segment_sum(messages.astype(jnp.float32), receivers, nodes)
            mean = to(summed / jnp.maximum(degree, 1)[:, None], dtype)
            joined = jnp.concatenate([x, mean], axis=-1)
            x = x + jax.nn.relu(dense(layer["update"], joined, dtype))
        return cross_entropy(dense(params["head"], x, dtype), labels)

    return plain(init, batch, loss)
