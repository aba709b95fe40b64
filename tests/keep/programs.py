"""Small programs with a loop over layers: what the tests of kept values run."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.numerics import normal

LAYERS, WIDTH, ROWS = 3, 8, 8
WEIGHTS = normal(
    0,
    q=(LAYERS, WIDTH, WIDTH),
    up=(LAYERS, WIDTH, 32),
    down=(LAYERS, 32, WIDTH),
    scale=(LAYERS, WIDTH),
)
WEIGHTS = {name: 0.2 * w for name, w in WEIGHTS.items()}
X = normal(1, x=(ROWS, WIDTH))["x"]


def normalized(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale


def block(x, w):
    """Attention and a two-layer network, each behind a norm and added to the stream."""
    h = normalized(x, w["scale"])
    scores = h @ w["q"] @ h.T
    x = x + jax.nn.softmax(scores) @ h
    return x + jax.nn.relu(jax.nn.gelu(normalized(x, w["scale"]) @ w["up"])) @ w["down"]


def scanned(weights, x, layer=block):
    """The mean square of the last layer."""
    last, _ = lax.scan(lambda x, w: (layer(x, w), None), x, weights)
    return jnp.mean(last**2)


def small_layer(x, w):
    return x + jnp.tanh(jnp.exp(-jax.nn.relu(x @ w["q"])) * w["scale"])


def small(weights, x):
    """As `scanned`, with a layer that compiles in no time."""
    return scanned(weights, x, small_layer)


def unrolled(weights, x):
    for i in range(LAYERS):
        x = block(x, jax.tree.map(lambda w, i=i: w[i], weights))
    return jnp.mean(x**2)


def nested(weights, x):
    """Layers in a loop over groups of two, of which one is in a branch."""
    pairs = jax.tree.map(lambda w: jnp.stack([w[:2], w[1:]]), weights)

    def group(x, w):
        x, _ = lax.scan(lambda x, w: (small_layer(x, w), None), x, w)
        first = jax.tree.map(lambda w: w[0], w)
        return lax.cond(
            x[0, 0] > 0, lambda x: small_layer(x, first), lambda x: jnp.tanh(x), x
        ), None

    return jnp.mean(lax.scan(group, x, pairs)[0] ** 2)


def with_remat(weights, x):
    return scanned(weights, x, jax.checkpoint(small_layer))


def with_while(weights, x):
    last = lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x), x)
    return small(weights, last)


PROGRAMS = {f.__name__: f for f in (unrolled, nested, with_remat, with_while)}
