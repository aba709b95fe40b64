"""Counts the bytes that models of Keras and Haiku keep for their backward pass.

    KERAS_BACKEND=jax python benchmarks/kept_by_others.py [--models ResNet50 MobileNetV2]

The models are those of the libraries, in training mode, with a batch of eight images of 224 x 224.
Nothing runs: the residuals are counted in the traced program, as `explain_kept` counts them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it when it is imported

import haiku as hk
import jax
import jax.numpy as jnp
import keras
from comparison.tables import as_markdown

from jmp_autocast import BF16, autocast, keep_less
from jmp_autocast.inspect import explain_kept

IMAGES = jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.float32)
KERAS = (
    "ResNet50 MobileNetV2 EfficientNetB0 DenseNet121 Xception ConvNeXtTiny VGG16 InceptionV3"
).split()
HAIKU = ("ResNet18", "MobileNetV1")

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def of_keras(name: str) -> Program:
    """Returns the loss of a model of `keras.applications`, and the shapes of its arguments."""
    model = getattr(keras.applications, name)(weights=None)
    shapes = [
        [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    ]

    def loss(trainable: Any, fixed: Any, images: jax.Array) -> jax.Array:
        return jnp.mean(model.stateless_call(trainable, fixed, images, training=True)[0] ** 2)

    return loss, (*shapes, IMAGES)


def of_haiku(name: str) -> Program:
    """Returns the loss of a model of `haiku.nets`, and the shapes of its arguments."""
    net = hk.transform_with_state(
        lambda x: getattr(hk.nets, name)(num_classes=1000)(x, is_training=True)
    )
    key = jax.random.key(0)
    params, state = jax.eval_shape(net.init, key, IMAGES)

    def loss(params: Any, state: Any, key: jax.Array, images: jax.Array) -> jax.Array:
        return jnp.mean(net.apply(params, state, key, images)[0] ** 2)

    return loss, (params, state, key, IMAGES)


MODELS: dict[str, Callable[[], Program]] = {
    **{name: lambda name=name: of_keras(name) for name in KERAS},
    **{f"{name} (Haiku)": lambda name=name: of_haiku(name) for name in HAIKU},
}


def row(name: str) -> list[str]:
    """Returns the cells of a model: megabytes, and the shares of those of bfloat16."""
    loss, shapes = MODELS[name]()
    full = explain_kept(loss, *shapes).declared_nbytes or 0
    mixed = explain_kept(keep_less(autocast(loss, policy=BF16), residuals="recompute"), *shapes)
    low, kept = mixed.declared_nbytes or 1, mixed.nbytes or 0
    megabytes = [f"{nbytes / 1e6:.0f}" for nbytes in (full, low, kept)]
    return [name, *megabytes, f"{kept / low:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    header = ["model", "float32 MB", "bfloat16 MB", 'with residuals="recompute" MB', "share"]
    print(as_markdown([header, *map(row, parser.parse_args(arguments).models)]))


if __name__ == "__main__":
    main()
