"""`quantize_params`: the weights of products in 8 bits, stored in 8 bits, for inference."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .call.arguments import check_function
from .call.fitting import of_a_call
from .call.switch import is_switched_off
from .cast_params import each_once, reads_of_leaves, wrapper_of_program
from .float8.dequantize import QuantizedArray
from .float8.scale import ScaleOf, Values, Weight
from .interpreters.after.stored_reads import Copied
from .interpreters.compat import Tracer
from .policies import E4M3, FLOAT32, as_recipe, may_use_float8
from .policies.callables import name_of

__all__ = ["QuantizedArray", "quantize_params"]


@of_a_call("quantize_params(fn, params, *args)")
def quantize_params(
    fn: Callable[..., Any],
    params: Any,
    *args: Any,
    policy: Any = None,
    donate: bool = False,
    **kwargs: Any,
) -> Any:
    """Returns the parameters, with each leaf in 8 bits that the program reads only in 8 bits.

    Such a leaf becomes a `QuantizedArray`: the values and the scale that the program would compute,
    in a quarter of the bytes. The `autocast` wrapper of ``fn`` accepts the tree in place of the
    parameters. It then quantizes only activations, and multiplies the same numbers. A leaf is
    quantized if all its readers are products in 8 bits that read the whole leaf. They may read it
    transposed, reshaped, or one layer of a stack in each iteration of a ``scan``, where each layer
    has a scale of its own. A weight stays as it is if anything else reads it, such as an embedding
    that also makes logits, or if a product reads only a part of it.

    Args:
        fn: The function in float32, or an `autocast` wrapper, whose options then apply. Its first
            argument holds the parameters.
        params: The parameters: any pytree of float32 arrays, such as Linen variables, the state of
            ``nnx.split``, a Haiku or Equinox model, or what Orbax restores. A
            ``jax.ShapeDtypeStruct`` becomes a `QuantizedArray` of two of them, for a restore.
            Shardings stay; a scale is on all devices.
        *args: The other positional arguments of ``fn``, as arrays or ``jax.ShapeDtypeStruct``.
        policy: A policy with ``matmul="float8"``; None for the wrapper's own.
        donate: Deletes each float32 leaf as soon as its 8-bit copy is made, so that memory never
            holds more than the tree and one leaf.
        **kwargs: The keyword arguments of ``fn``.

    Returns:
        A pytree of the structure of ``params``, with a `QuantizedArray` for each such leaf. If
        there is no such leaf, a warning says so. With ``JMP_AUTOCAST=0`` in the environment it is
        ``params`` itself.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: The policy has no products in 8 bits, or scales of rows; or ``fn`` is a wrapper,
            and ``policy`` is given as well or it has ``enabled=False``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import Float8, Policy, autocast
        >>> from jmp_autocast.quantize_params import quantize_params
        >>> recipe = Float8(minimum=16, skip=(), emulate=True)
        >>> apply = autocast(
        ...     lambda params, x: x @ params["w"] + params["b"],
        ...     policy=Policy(jnp.bfloat16, matmul=recipe),
        ... )
        >>> params, x = {"w": jnp.eye(64) / 3, "b": jnp.ones(64)}, jnp.ones((16, 64))
        >>> small = quantize_params(apply, params, x)
        >>> small["w"].values.dtype, small["w"].nbytes, small["b"].dtype
        (dtype(float8_e4m3fn), 4100, dtype('float32'))
        >>> bool((jax.jit(apply)(small, x) == jax.jit(apply)(params, x)).all())
        True
    """
    check_function(fn, "quantize_params", "Pass the function itself, then the parameters.")
    wrapper = wrapper_of_program(fn, policy, "quantize_params")
    if not may_use_float8(wrapper.policy):
        raise ValueError(
            f"quantize_params got {name_of(fn)} with a policy that multiplies nothing in 8 bits. "
            'Pass policy=Policy(jnp.bfloat16, matmul="float8"), or the autocast function that has '
            "it."
        )
    recipe = as_recipe(wrapper.policy.matmul)
    if recipe is not None and recipe.scaling != "tensor":
        raise ValueError(
            f"quantize_params stores one scale for an array, or for each layer of a stack, and the "
            f"policy of {name_of(fn)} asks for Float8(scaling={recipe.scaling!r}). Pass a policy "
            'with scaling="tensor", or keep the parameters in float32.'
        )
    if is_switched_off():  # as the program reads them then
        return params
    leaves, structure = jax.tree.flatten(params)
    reads = reads_of_leaves(wrapper, params, args, kwargs)
    stored = each_once(leaves, reads, _stored, donate)
    if all(x is y for x, y in zip(leaves, stored, strict=True)):
        warnings.warn(
            f"quantize_params stored no parameter of {name_of(fn)} in 8 bits: no product in 8 bits "
            "reads one that nothing else reads. jmp_autocast.explain says of each product why.",
            stacklevel=4,
        )
    return structure.unflatten(stored)


def _stored(leaf: Any, read: Any) -> Any:
    """Returns a leaf in 8 bits, with scales of their own along its first dimensions.

    What is read in another way is returned as it is.
    """
    if not isinstance(read, Copied) or read.slices is None:
        return leaf
    scales = read.slices
    sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    of_scale = sharding
    if isinstance(sharding, NamedSharding):
        of_scale = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:scales]))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        values = leaf.update(dtype=E4M3)
        shape = leaf.shape[:scales]
        return QuantizedArray(values, jax.ShapeDtypeStruct(shape, FLOAT32, sharding=of_scale))
    return _quantized(scales, sharding, of_scale)(leaf)


@functools.lru_cache(maxsize=64)
def _quantized(scales: int, *shardings: Any) -> Callable[[Any], QuantizedArray]:
    key = Values(E4M3)

    def quantized(x: Any) -> QuantizedArray:
        copies = key.copies(x, {}, Weight(scales))
        return QuantizedArray(copies[key], copies[ScaleOf(key)])

    # As one program, which makes no float32 array on the way.
    return jax.jit(quantized, out_shardings=QuantizedArray(*shardings))
