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
    "scanned layers": lambda: scanned(Layer),
    "scanned layers, recomputed": lambda: scanned(nn.remat(Layer)),
    "gru": lambda: nn.RNN(nn.GRUCell(5)),
    "attention with normalized queries": lambda: nn.MultiHeadDotProductAttention(
        2, normalize_qk=True
    ),
    "weight norm": lambda: nn.Sequential([nn.WeightNorm(nn.Dense(5)), nn.tanh, nn.PReLU()]),
    "dense general and einsum": lambda: nn.Sequential(
        [nn.DenseGeneral((2, 3)), nn.gelu, nn.Einsum((2, 3, 4), "abhd,hdc->abc")]
    ),
}
for _name, _make in SEQUENCES.items():
    PROGRAMS[_name] = layer(_make, 2, 5, 10)


@PROGRAMS.add(grad=(0, 2))
def spectral_norm(draw):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.SpectralNorm(nn.Dense(6))(x, update_stats=True)
            return nn.SpectralNorm(nn.Dense(5))(jnp.tanh(x), update_stats=True)

    def apply(params, stats, x):
        variables = {"params": params, "batch_stats": stats}
        return Model().apply(variables, x, mutable=["batch_stats"])

    x = draw(6, 6)
    variables = draw.filled(Model().init, KEY, x)
    return apply, (variables["params"], variables["batch_stats"], x)


@PROGRAMS.add()
def residual_block_with_batch_norm(draw):
    """A bottleneck block of the ImageNet example, in training."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = lambda: nn.BatchNorm(use_running_average=False, momentum=0.9)
            y = nn.silu(norm()(nn.Conv(5, (1, 1), use_bias=False)(x)))
            y = nn.silu(norm()(nn.Conv(5, (3, 3), strides=2, use_bias=False)(y)))
            y = norm()(nn.Conv(6, (1, 1), use_bias=False)(y))
            residual = norm()(nn.Conv(6, (1, 1), 2, use_bias=False)(x))
            return nn.Dense(3)(nn.silu(y + residual).mean((1, 2)))

    def apply(params, stats, x):
        return Block().apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])

    x = draw(4, 6, 6, 5)
    variables = draw.filled(Block().init, KEY, x)
    return apply, (variables["params"], variables["batch_stats"], x)


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
