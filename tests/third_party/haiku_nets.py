"""Haiku: its networks and layers."""

import haiku as hk
import jax
import jax.numpy as jnp

from .program import Program, Table

PROGRAMS = Table()
KEY = jax.random.key(0)


def net(forward, *shape, **options):
    """A program that applies a transformed function; parameters and input are differentiated."""

    def build(draw):
        model = hk.without_apply_rng(hk.transform_with_state(forward))
        x = draw(*shape)
        params, state = draw.filled(model.init, KEY, x)
        return model.apply, (params, state, x)

    return Program(build, **{"grad": (0, 2), **options})


def quantized(x):
    """An encoder, a codebook with moving averages, and a decoder."""
    z = hk.Conv2D(6, 2, stride=2)(x)
    codes = hk.nets.VectorQuantizerEMA(6, 5, 0.25, 0.9)(z, is_training=True)
    y = hk.Conv2DTranspose(2, 2, stride=2)(codes["quantize"])
    return y, codes["loss"], codes["perplexity"]


def unrolled(make):
    def forward(x):
        core = make()
        y, state = hk.dynamic_unroll(
            core, x, core.initial_state(x.shape[1]), return_all_states=False
        )
        return hk.Linear(2)(y), state

    return forward


def depthwise(x):
    x = jnp.tanh(hk.DepthwiseConv2D(2, 3)(x))
    return hk.GroupNorm(2)(hk.SeparableDepthwiseConv2D(1, 5)(x))


PROGRAMS |= {
    "vector quantizer": net(quantized, 2, 4, 4, 2),
    "lstm": net(unrolled(lambda: hk.LSTM(6)), 4, 2, 3),
    "depthwise convolutions": net(depthwise, 2, 4, 4, 2),
}
