"""A GPT on many chips: parameters and batch split as FSDP does it, with or without tensor axes."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import optax
from comparison.cases import Case, Tree
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from . import models
from .programs import LOSSES, Program, shapes_of, training_step
from .targets import devices

_VOCABULARY = 50304  # 50257 is prime, and cannot be split
SIZES = {
    "small": {"layers": 2, "width": 512, "heads": 8},
    "1.3B": {"layers": 24, "width": 2048, "heads": 16},
    "7B": {"layers": 32, "width": 4096, "heads": 32},
}
"""Scanned over layers, with remat, so that the compile time does not depend on the layers."""


def parse_mesh(text: str) -> tuple[int, int]:
    """Returns the sizes of the axes: ``16`` is FSDP, ``4x4`` is FSDP times tensor."""
    sizes = [int(size) for size in text.split("x")]
    if not 1 <= len(sizes) <= 2 or min(sizes) < 1:
        raise ValueError(f"A mesh is written 16 or 4x4, not {text!r}.")
    return sizes[0], math.prod(sizes[1:])


def sharded_program(
    target: str, mesh_sizes: tuple[int, int], size: str, variant: str, dtype: Any, length: int
) -> Program:
    """Returns a training step of a GPT on a mesh.

    Args:
        target: The chip.
        mesh_sizes: The devices along the FSDP axis and along the tensor axis.
        size: One of `SIZES`.
        variant: One of `LOSSES`.
        dtype: The compute dtype.
        length: The positions of a sequence; there is one sequence for each part of the FSDP axis.
    """
    found = devices(target, math.prod(mesh_sizes))
    mesh = Mesh(np.array(found).reshape(mesh_sizes), ("fsdp", "tensor"))
    stream = NamedSharding(mesh, P("fsdp", None, None))

    def constrain(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, stream)

    sizes = SIZES[size] | {"vocabulary": _VOCABULARY, "scan": True, "remat": True}
    inputs = (mesh_sizes[0], length)
    bare = Case("gpt", models.Gpt, sizes, inputs, _VOCABULARY)
    case = Case("gpt", models.Gpt, sizes | {"constrain": constrain}, inputs, _VOCABULARY)
    params, batch = shapes_of(bare)
    tx = optax.adamw(1e-4)

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec(path, leaf.shape, mesh_sizes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = params, jax.eval_shape(tx.init, params)
    placed = jax.tree_util.tree_map_with_path(place, state)
    rows = NamedSharding(mesh, P("fsdp"))
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows), batch
    )
    kept = jax.tree.map(lambda leaf: leaf.sharding, placed)
    step = training_step(LOSSES[variant](case, dtype), tx)
    return Program(step, (*placed, batch), (*kept, None, None))


def spec(path: Any, shape: tuple[int, ...], mesh_sizes: tuple[int, int]) -> P:
    """Returns how a parameter, or a moment of it, is split.

    Along the FSDP axis the first dimension that can be is split. Along the tensor axis a kernel
    that widens is split by its columns and one that narrows by its rows, as Megatron does it. What
    has one dimension is on every chip.
    """
    fsdp, tensor = mesh_sizes
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    first = 1 if "stack" in names else 0  # the dimension of the layers is scanned over
    body = shape[first:]
    axes: list[str | None] = [None] * len(body)
    if len(body) == 2:
        if tensor > 1 and "kernel" in names:
            axes = ["fsdp", "tensor"] if body[1] > body[0] else ["tensor", "fsdp"]
        else:
            split = next((n for n, size in enumerate(body) if size % fsdp == 0), None)
            if split is not None:
                axes[split] = "fsdp"
    return P(*[None] * first, *axes)


def parameters_of(program: Program) -> int:
    """Returns the number of parameters."""
    params: Tree = program.arguments[0]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
