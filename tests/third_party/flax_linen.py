"""Flax linen: layers, and models in the shapes of Flax's examples."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .program import Program, Table

PROGRAMS = Table()
KEY = jax.random.key(0)


def layer(make, *shape, **options):
    """A program that applies a module to an array; both are differentiated."""

    def build(draw):
        x, module = draw(*shape), make()
        return module.apply, (draw.filled(module.init, KEY, x), x)

    return Program(build, **{"grad": (0, 1), **options})


LAYERS = {
    "conv transpose and group norm": lambda: nn.Sequential(
        [nn.ConvTranspose(4, (3, 3), strides=(2, 2)), nn.GroupNorm(2), nn.silu, nn.Conv(2, (3, 3))]
    ),
    "conv local": lambda: nn.ConvLocal(3, (2, 2)),
    "instance norm": lambda: nn.Sequential([nn.Conv(3, (3, 3)), nn.InstanceNorm(), nn.gelu]),
}
for _name, _make in LAYERS.items():
    PROGRAMS[_name] = layer(_make, 2, 4, 4, 2)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.tanh(nn.Dense(10)(nn.LayerNorm()(x))), None


def scanned(layer):
    """Three layers in a scan, with stacked parameters."""
    layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return nn.Sequential([lambda x: layers()(x, None)[0], nn.Dense(3)])


SEQUENCES = {
    "scanned layers, recomputed": lambda: scanned(nn.remat(Layer)),
    "gru": lambda: nn.RNN(nn.GRUCell(5)),
    "weight norm": lambda: nn.Sequential([nn.WeightNorm(nn.Dense(5)), nn.tanh, nn.PReLU()]),
    "dense general and einsum": lambda: nn.Sequential(
        [nn.DenseGeneral((2, 3)), nn.gelu, nn.Einsum((2, 3, 4), "abhd,hdc->abc")]
    ),
}
for _name, _make in SEQUENCES.items():
    PROGRAMS[_name] = layer(_make, 2, 5, 10)


@PROGRAMS.add()
def language_model_with_tied_embedding(draw):
    """Embedding, causal attention and logits of the one-billion-word example."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(11, 12)
            x = embed(tokens) + self.param("positions", nn.initializers.normal(), (6, 12))
            mask = nn.combine_masks(
                nn.make_causal_mask(tokens), nn.make_attention_mask(tokens, tokens)
            )
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(12)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
            return embed.attend(nn.LayerNorm()(x))

    def loss(params, tokens):
        logits = Model().apply(params, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = draw.integers(10, 2, 6) + 1
    return loss, (draw.filled(Model().init, KEY, tokens), tokens)
