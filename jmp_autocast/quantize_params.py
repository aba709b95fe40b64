"""`quantize_params`: stores the weights of 8-bit products in 8 bits, for inference."""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .autocast import wrapper_for
from .call.switch import is_switched_off
from .float8.dequantize import QuantizedArray, is_quantized
from .float8.products import untrained
from .float8.scale import ScaleOf, Values, Weight
from .interpreters.after.walk import walk_plan
from .interpreters.compat import Tracer
from .interpreters.plan.data import Plan, ReasonCode
from .interpreters.plan.reads import Copied
from .planned_params import PlannedParams, each_once, is_abstract
from .policies import COMPUTE_DTYPES, E4M3, FLOAT32, Policy, PolicyLike, as_recipe, may_use_float8
from .policies.callables import name_of
from .policies.errors import with_usage

__all__ = ["QuantizedArray", "quantize_params"]


@with_usage("quantize_params(fn, params, *args)")
def quantize_params(
    fn: Callable[..., Any],
    params: Any,
    *args: Any,
    policy: PolicyLike | None = None,
    **kwargs: Any,
) -> Any:
    """Stores in 8 bits the parameters that a program reads only in 8 bits.

    Such a parameter becomes a `QuantizedArray`: the values and the scale that the program would
    compute, in a quarter of the bytes. The `autocast` wrapper of ``fn`` accepts the tree in place
    of the parameters. The program then quantizes only activations, and multiplies the same numbers
    as before. Any number of tokens runs in 8 bits; with float32 parameters, a batch of 1 runs in 16
    bits. The tree does not depend on the batch.

    A leaf is quantized if all its consumers are products in 8 bits that read the whole leaf. The
    products may read the leaf transposed or reshaped. A ``scan`` may read one layer of a stack in
    each iteration, and the stack gets one scale for each layer. A weight stays float32 if any other
    operation reads it (as for an embedding that is also the head), or if a product reads only a
    part of it. `cast_params`, called before or after, stores the remaining leaves in 16 bits.

    Args:
        fn: The function in float32, or an `autocast` wrapper, whose options then apply. Its first
            argument holds the parameters.
        params: The parameters: any pytree of arrays, such as Linen variables, an NNX module or the
            state of ``nnx.split``, a Haiku or Equinox model, or a tree from Orbax. The plan treats
            16-bit leaves as float32 (`as_float32`); a leaf that is not quantized stays as it is. A
            ``jax.ShapeDtypeStruct`` becomes a `QuantizedArray` of abstract arrays, to restore a
            checkpoint. The values keep the sharding of the leaf; a scale is on all devices.
        *args: The other positional arguments of ``fn``, as arrays or ``jax.ShapeDtypeStruct``.
        policy: A policy with ``matmul="float8"``; None for the policy of the wrapper.
        **kwargs: The keyword arguments of ``fn``.

    Returns:
        A pytree of the structure of ``params``, with a `QuantizedArray` for each quantized leaf. If
        no leaf is quantized, the function warns. With ``JMP_AUTOCAST=0`` in the environment it
        returns ``params``.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: The policy has no products in 8 bits, or its recipe has a scale for each row; or
            ``fn`` is a wrapper, and ``policy`` is given as well or the wrapper has
            ``enabled=False``.

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
    wrapper = wrapper_for("quantize_params", fn, policy, (params, *args), kwargs)
    _check_recipe(wrapper.policy, name_of(fn))
    if is_switched_off():  # nothing is cast, so the program reads float32
        return params
    leaves, structure = jax.tree.flatten(params)
    program = PlannedParams(wrapper, structure.unflatten(map(_widened, leaves)), args, kwargs)
    plan = program.plan_for(untrained)
    stored = each_once(leaves, program.reads(plan), _stored)
    if not any(map(is_quantized, jax.tree.leaves((params, stored), is_leaf=is_quantized))):
        warnings.warn(_nothing_stored(name_of(fn), plan), stacklevel=4)
    return structure.unflatten(stored)


# The fixes that the warning suggests. A key is a part of the reason why a product stays in 16
# bits.
_FIXES = {
    "below the minimum": " Float8(minimum=...) sets it.",
    "no other matrix product follows": " Float8(skip=()) takes such products, too.",
    "no operand is a parameter": " Write autocast(fn, params=0) if argument 0 holds them.",
}


def _widened(leaf: Any) -> Any:
    """Returns the leaf for the plan: a float32 ``ShapeDtypeStruct`` for a 16-bit leaf."""
    is_narrow = getattr(leaf, "dtype", None) in COMPUTE_DTYPES
    return jax.eval_shape(lambda x: x.astype(FLOAT32), leaf) if is_narrow else leaf


def _nothing_stored(name: str, plan: Plan) -> str:
    """Returns the warning for a program in which no leaf can be stored in 8 bits."""
    reasons = [visit.plan.reason for visit in walk_plan(plan)]
    start = f"quantize_params stored no parameter of {name} in 8 bits"
    causes = collections.Counter(r.cause for r in reasons if r.code is ReasonCode.NOT_FLOAT8)
    if not causes or any(r.code is ReasonCode.FLOAT8 for r in reasons):
        return f"{start}: its products share their weights with other operations, or read parts."
    ((cause, _),) = causes.most_common(1)
    fix = next((fix for words, fix in _FIXES.items() if words in cause), "")
    return f"{start}: {cause}.{fix} jmp_autocast.explain shows the reason for each product."


def _check_recipe(policy: Policy, name: str) -> None:
    """Raises ValueError for a policy without 8-bit products, or with a scale for each row."""
    if not may_use_float8(policy):
        raise ValueError(
            f"quantize_params got {name} with a policy that multiplies nothing in 8 bits. "
            'Pass policy=Policy(jnp.bfloat16, matmul="float8"), or the autocast function that has '
            "it."
        )
    recipe = as_recipe(policy.matmul)
    if recipe is not None and recipe.scaling != "tensor":
        raise ValueError(
            f"quantize_params stores one scale for an array, or for each layer of a stack, and the "
            f"policy of {name} has Float8(scaling={recipe.scaling!r}). Pass a policy "
            'with scaling="tensor", or keep the parameters in float32.'
        )


def _stored(leaf: Any, read: Any) -> Any:
    """Returns the leaf in 8 bits if only 8-bit products use it, else the leaf itself."""
    if not isinstance(read, Copied) or read.slices is None:
        return leaf
    scales = read.slices
    sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    of_scale = sharding
    if isinstance(sharding, NamedSharding):
        of_scale = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:scales]))
    if is_abstract(leaf):
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

    # Values and scale come from one jitted program, which stores no float32 copy in between.
    return jax.jit(quantized, out_shardings=QuantizedArray(*shardings))
