"""`cast_params`: stores parameters in 16 bits if all their uses are in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from .autocast import wrapper_for
from .call.switch import is_switched_off
from .float8.products import untrained
from .planned_params import PlannedParams, each_once, is_abstract
from .policies import COMPUTE_DTYPES, PolicyLike, may_use_float8
from .policies.errors import with_usage

T = TypeVar("T")


@with_usage("cast_params(fn, params, *args)")
def cast_params(
    fn: Callable[..., Any],
    params: T,
    *args: Any,
    policy: PolicyLike | None = None,
    **kwargs: Any,
) -> T:
    """Casts to 16 bits the parameters that a program reads only in 16 bits.

    A leaf is cast if, in the plan of `autocast`, all its consumers in every branch and loop read it
    in one 16-bit dtype. A leaf that a norm, a comparison or a float32 residual stream reads in
    float32 stays float32, and so does a leaf that nothing reads. If you widen the cast leaves to
    float32 again, the program returns the same bits: its own cast to 16 bits then rounds nothing.
    Under ``jit``, XLA removes the widening together with the cast that follows.

    Args:
        fn: The function in float32, or an `autocast` wrapper, whose options then apply. Its first
            argument holds the parameters.
        params: The parameters: any pytree of arrays, such as Linen variables, an NNX module or the
            state of ``nnx.split``, a Haiku or Equinox model, or a tree from Orbax. A
            ``jax.ShapeDtypeStruct`` gets the new dtype, so that a checkpoint can be restored in 16
            bits. Shardings and leaves that `quantize_params` stored in 8 bits stay as they are.
        *args: The other positional arguments of ``fn``, as arrays or ``jax.ShapeDtypeStruct``.
        policy: As for `autocast`; None for the policy of the wrapper, or the default.
        **kwargs: The keyword arguments of ``fn``.

    Returns:
        A pytree of the structure of ``params``; with ``JMP_AUTOCAST=0`` in the environment
        ``params`` itself.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: ``fn`` is a wrapper, and ``policy`` is given as well or the wrapper has
            ``enabled=False``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, autocast, cast_params
        >>> from jmp_autocast.optimizers import as_float32
        >>> def apply(params, x):
        ...     x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)) * params["scale"]
        ...     return x @ params["w"]
        >>> params, x = {"scale": jnp.ones(8), "w": jnp.ones((8, 4)) / 3}, jnp.ones((2, 8))
        >>> small = cast_params(apply, params, x, policy=BF16)
        >>> {name: leaf.dtype.name for name, leaf in small.items()}
        {'scale': 'float32', 'w': 'bfloat16'}
        >>> predict = jax.jit(lambda params, x: autocast(apply, policy=BF16)(as_float32(params), x))
        >>> bool((predict(small, x) == predict(params, x)).all())
        True
    """
    wrapper = wrapper_for("cast_params", fn, policy, (params, *args), kwargs)
    if is_switched_off():  # nothing is cast, so the program reads float32
        return params
    program = PlannedParams(wrapper, params, args, kwargs)
    # A leaf that `quantize_params` would store in 8 bits stays float32. `serving` is the plan of
    # `quantize_params`.
    plan = program.planned.plan
    serving = program.plan_for(untrained) if may_use_float8(wrapper.policy) else plan
    pairs = zip(program.reads(plan), program.reads(serving), strict=True)
    dtypes = [
        d if d == e and isinstance(d, np.dtype) and d in COMPUTE_DTYPES else None for d, e in pairs
    ]
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten(each_once(leaves, dtypes, _cast))


def _cast(leaf: Any, dtype: np.dtype | None) -> Any:
    if dtype is None:
        return leaf
    return leaf.update(dtype=dtype) if is_abstract(leaf) else leaf.astype(dtype)
