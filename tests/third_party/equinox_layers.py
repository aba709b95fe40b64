"""Equinox: layers and small models, which are pytrees themselves."""

import equinox as eqx
import jax
import jax.numpy as jnp

from .program import Program, Table

PROGRAMS = Table()
KEY = jax.random.key(0)


def model(make, apply, *shape, **options):
    """A program ``apply(model, x)``; the model's arrays and the input are differentiated."""

    def build(draw):
        arrays, static = eqx.partition(
            eqx.filter_eval_shape(make, KEY), lambda x: isinstance(x, jax.ShapeDtypeStruct)
        )

        def run(arrays, x):
            return apply(eqx.combine(arrays, static), x)

        return run, (draw.arrays(arrays), draw(*shape))

    return Program(build, **{"grad": (0, 1), **options})


def rotary_attention(modules, x):
    attention, rope = modules

    def heads(q, k, v):
        return jax.vmap(rope, 1, 1)(q), jax.vmap(rope, 1, 1)(k), v

    mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
    return attention(x, x, x, mask=mask, process_heads=heads)


PROGRAMS |= {
    "rotary attention": model(
        lambda key: (
            eqx.nn.MultiheadAttention(2, 12, use_query_bias=True, key=key),
            eqx.nn.RotaryPositionalEmbedding(6),
        ),
        rotary_attention,
        5,
        12,
    ),
}
