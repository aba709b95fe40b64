"""GPT, ResNet-50, and a GPT in NNX, as their authors write them, with ``dtype=`` threaded through.

ViT and LSTM are those of `comparison.models`, and so are the blocks of the GPT.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from comparison.models import Block, Mixed
from flax import nnx

Constrain = Callable[[jax.Array], jax.Array]


def as_it_is(x: jax.Array) -> jax.Array:
    """The constraint of a program for one device: none."""
    return x


class _ScanBlock(Mixed):
    """A block with the signature that `nn.scan` wants."""

    heads: int = 4
    constrain: Constrain = as_it_is

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        block = self.layer(Block, heads=self.heads, causal=True)
        return self.constrain(block(x)), None


class Gpt(Mixed):
    """GPT-2: learned positions, pre-norm blocks, an output layer that is the token embedding.

    Args:
        scan: One block, scanned over stacked parameters.
        remat: `jax.checkpoint` around each block.
        constrain: Applied to the residual stream: a sharding constraint.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    scan: bool = False
    remat: bool = False
    constrain: Constrain = as_it_is

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = self.layer(nn.Embed, self.vocabulary, self.width)
        x = embed(tokens) + self.leaf("pos_embedding", (tokens.shape[1], self.width))
        x = self.constrain(x)
        if self.scan:
            # In a scan XLA cannot merge the recomputation with the forward pass, which is what
            # prevent_cse is there to prevent, at the price of barriers.
            block = nn.remat(_ScanBlock, prevent_cse=False) if self.remat else _ScanBlock
            stack = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            x, _ = self.layer(stack, heads=self.heads, constrain=self.constrain, name="stack")(
                x, None
            )
        else:
            block = nn.remat(Block) if self.remat else Block
            for layer in range(self.layers):
                made = self.layer(block, heads=self.heads, causal=True, name=f"block_{layer}")
                x = self.constrain(made(x))
        return embed.attend(self.layer(nn.LayerNorm)(x))


class ResNet50(Mixed):
    """ResNet-50 v1.5 in training mode, with max pooling behind the first convolution."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        conv = functools.partial(self.layer, nn.Conv, use_bias=False)
        norm = functools.partial(self.layer, nn.BatchNorm, use_running_average=False, momentum=0.9)
        x = conv(self.width, (7, 7), strides=(2, 2), padding=[(3, 3), (3, 3)])(images)
        x = nn.relu(norm()(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            features = self.width * 2**stage
            for block in range(blocks):
                strides = (2, 2) if stage and not block else (1, 1)
                y = nn.relu(norm()(conv(features, (1, 1))(x)))
                y = nn.relu(norm()(conv(features, (3, 3), strides=strides)(y)))
                y = norm(scale_init=nn.initializers.zeros)(conv(4 * features, (1, 1))(y))
                if x.shape != y.shape:
                    x = norm()(conv(4 * features, (1, 1), strides=strides)(x))
                x = nn.relu(x + y)
        return self.layer(nn.Dense, self.classes)(jnp.mean(x, (1, 2)))


class _NnxBlock(nnx.Module):
    """A pre-norm transformer block with Flax's own attention."""

    def __init__(self, width: int, heads: int, layer: Callable[..., Any], rngs: nnx.Rngs):
        self.norms = nnx.List([layer(nnx.LayerNorm, width) for _ in range(2)])
        self.attention = layer(nnx.MultiHeadAttention, heads, width, decode=False)
        self.widen = layer(nnx.Linear, width, 4 * width)
        self.narrow = layer(nnx.Linear, 4 * width, width)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.narrow(nnx.gelu(self.widen(self.norms[1](x))))


class _NnxGpt(nnx.Module):
    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        length: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        def layer(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return kind(*args, dtype=dtype, rngs=rngs, **kwargs)

        self.embed = layer(nnx.Embed, vocabulary, width)
        self.positions = layer(nnx.Embed, length, width)
        self.blocks = nnx.List([_NnxBlock(width, heads, layer, rngs) for _ in range(layers)])
        self.norm = layer(nnx.LayerNorm, width)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


class NnxGpt:
    """The GPT in NNX, with the `init` and `apply` of a Linen module.

    An NNX module holds its parameters. Training splits them off and merges them again, as
    `nnx.split` and `nnx.merge` do here.
    """

    def __init__(self, dtype: Any = None, param_dtype: Any = jnp.float32, **sizes: Any):
        if param_dtype != jnp.float32:
            raise ValueError(f"The parameters are float32, not {param_dtype}.")
        self.make = functools.partial(_NnxGpt, dtype=dtype, **sizes)

    def init(self, key: jax.Array, tokens: jax.Array) -> dict[str, Any]:
        """Returns the parameters, under the name that Linen gives them."""
        model = self.make(length=tokens.shape[1], rngs=nnx.Rngs(key))
        return {"params": nnx.state(model, nnx.Param)}

    def apply(
        self, variables: dict[str, Any], tokens: jax.Array, mutable: Any = ()
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the logits, and that no other state has changed."""
        abstract = nnx.eval_shape(lambda: self.make(length=tokens.shape[1], rngs=nnx.Rngs(0)))
        graph, _, rest = nnx.split(abstract, nnx.Param, ...)
        return nnx.merge(graph, variables["params"], rest)(tokens), {}
