"""Flax NNX: layers whose calls change their state, through the integration for NNX."""

from flax import nnx

from jmp_autocast.integrations.nnx import autocast as nnx_autocast

from .program import Program, Table

PROGRAMS = Table()


class Applied:
    """A call of a module as a function of its parameters, its other state and the input.

    It returns the output and the state after the call.
    """

    def __init__(self, graph, call, cast=lambda call: call):
        self.graph, self.call, self.cast = graph, call, cast

    def __call__(self, params, others, x):
        model = nnx.merge(self.graph, params, others, copy=True)
        out = self.cast(self.call)(model, x)
        return out, nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))


def with_autocast(applied, dtype):
    def cast(call):
        return nnx_autocast(call, dtype)

    return Applied(applied.graph, applied.call, cast)


def call_it(model, x):
    return model(x)


def model(make, *shape, call=call_it, **options):
    def build(draw):
        graph, params, others = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
        others = draw.arrays(others)
        return Applied(graph, call), (draw.arrays(params), others, draw(*shape))

    return Program(build, **{"grad": (0, 2), "cast": with_autocast, **options})


class ResidualBlock(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(4, rngs=rngs)
        self.conv2 = nnx.ConvTranspose(4, 3, (3, 3), rngs=rngs)
        self.norm2 = nnx.GroupNorm(3, 3, rngs=rngs)

    def __call__(self, x):
        y = nnx.silu(self.norm1(self.conv1(x)))
        return nnx.silu(x + self.norm2(self.conv2(y)))


class Decoder(nnx.Module):
    """One step of decoding with a cache."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 12, decode=True, rngs=rngs)
        self.attention.init_cache((2, 6, 12))

    def __call__(self, x):
        return self.attention(self.attention(x)[:, :1] + x)


class Lora(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Einsum("abc,cde->abde", (6, 2, 3), rngs=rngs)
        self.lora = nnx.LoRALinear(6, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.lora(nnx.gelu(self.base(x)).reshape(*x.shape[:2], 6))


PROGRAMS |= {
    "residual block": model(ResidualBlock, 3, 4, 4, 3),
    "attention with a cache": model(Decoder, 2, 1, 12),
    "low-rank adaptation": model(Lora, 2, 3, 6),
    "spectral norm": model(
        lambda rngs: nnx.SpectralNorm(nnx.Linear(6, 5, rngs=rngs), rngs=rngs),
        5,
        6,
        call=lambda m, x: m(x, update_stats=True),
    ),
}
