"""`QuantizedArray`: an array stored in 8 bits, and the equation that returns it in float32."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax import export, lax

from ..interpreters.compat import with_dtype
from ..interpreters.compat.registration import (
    all_at_front,
    define_primitive,
    lowers_by_platform,
)
from ..policies import FLOAT32


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A float32 array that is stored as 8-bit values and a scale; a pytree of the two.

    A function in `autocast` takes a `QuantizedArray` in place of the array. A product in 8 bits
    reads the values and the scale; any other operation reads the array in float32.

    Args:
        values: The values, of dtype float8_e4m3fn and the shape of the array.
        scale: The float32 scale, whose shape is the first dimensions of the array: a scalar, or one
            number for each layer of a stack. The array is values times scale.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast.quantize_params import QuantizedArray
        >>> array = QuantizedArray(jnp.ones((2, 4), jnp.float8_e4m3fn), jnp.float32(0.5))
        >>> array.shape, array.nbytes, array.dequantized()[0].tolist()
        ((2, 4), 12, [0.5, 0.5, 0.5, 0.5])
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast.quantize_params import QuantizedArray
            >>> QuantizedArray(jnp.ones((2, 4), jnp.float8_e4m3fn), jnp.float32(0.5)).shape
            (2, 4)
        """
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """The bytes of the values and the scale together.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast.quantize_params import QuantizedArray
            >>> QuantizedArray(jnp.ones((2, 4), jnp.float8_e4m3fn), jnp.ones(2)).nbytes
            16
        """
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in (self.values, self.scale))

    def dequantized(self) -> Any:
        """Returns the array in float32.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast.quantize_params import QuantizedArray
            >>> values = jnp.ones((2, 2), jnp.float8_e4m3fn)
            >>> QuantizedArray(values, jnp.array([1.0, 2.0])).dequantized().tolist()
            [[1.0, 1.0], [2.0, 2.0]]
        """
        return dequantize_p.bind(self.values, self.scale)


# `jax.export` saves the pytree structures of arguments and results, and needs a registration for
# that. A program that loads such an export must import this package.
export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="jmp_autocast.QuantizedArray",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)


def is_quantized(x: Any) -> bool:
    """Returns whether a node is a `QuantizedArray`, for ``is_leaf``."""
    return isinstance(x, QuantizedArray)


def arrays_of(leaf: Any) -> Iterable[tuple[str, Any]]:
    """Returns pairs of a path suffix and an array: two for a `QuantizedArray`, else one."""
    if is_quantized(leaf):
        return ("/values", leaf.values), ("/scale", leaf.scale)
    return (("", leaf),)


def next_of(arrays: Iterator[Any], leaf: Any) -> Any:
    """Returns the float value of a leaf, made of the next one or two of the given arrays.

    The two arrays of a `QuantizedArray` are its values and scale.
    """
    if is_quantized(leaf):
        return QuantizedArray(next(arrays), next(arrays)).dequantized()
    return next(arrays)


def dequantized(tree: Any) -> Any:
    """Returns a pytree with the float32 array in place of each `QuantizedArray`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_quantized)
    if not any(map(is_quantized, leaves)):
        return tree
    return structure.unflatten(x.dequantized() if is_quantized(x) else x for x in leaves)


def _float32(values: Any, scale: Any) -> Any:
    factors = lax.expand_dims(scale, range(scale.ndim, values.ndim))
    return lax.convert_element_type(values, FLOAT32) * factors


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    raise TypeError(
        "A QuantizedArray has no gradient: its values have 8 bits. Take the gradient by the "
        "arguments that are trained, and pass quantized parameters as another argument."
    )


def _batch(operands: Sequence[Any], dims: Sequence[int | None]) -> tuple[Any, int]:
    return dequantize_p.bind(*all_at_front(operands, dims)), 0


# Dequantization is a primitive, so that the planner finds its equation in the traced program.
dequantize_p: Any = define_primitive(
    "dequantize",
    value=_float32,
    aval=lambda values, scale: with_dtype(values, FLOAT32),
    jvp=_jvp,
    batch=_batch,
)
lowers_by_platform(dequantize_p, default=_float32)
