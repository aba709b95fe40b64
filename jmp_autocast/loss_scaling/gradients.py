"""Gradients of a loss that is multiplied by a scale."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..policies.callables import signature_of
from ..policies.errors import a, shown
from .check_arguments import check_scale, is_real
from .find_state import check_order, has_loss_scale, only_loss_scale
from .unscale import at_least_float32, is_inexact

P = ParamSpec("P")
R = TypeVar("R")


def scaled_value_and_grad(
    fn: Callable[P, R],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[Concatenate[Any, P], tuple[R, Any]]:
    """Like ``jax.value_and_grad``, but the gradients that it returns are multiplied by a scale.

    The result takes one more argument in front: the scale, or an optimizer state that holds one.
    ``argnums`` counts the arguments of ``fn`` and leaves the scale out.

    The loss is scaled in float32, so that a float16 loss of 2.0 times 65536 does not overflow. The
    cotangent of a float16 loss is float16, so it is a power of two near the scale and at most
    2**15. The gradients are then multiplied by the scale divided by this cotangent.

    Args:
        fn: A function that returns a floating scalar, or a floating scalar and auxiliary data.
        argnums: Which positional arguments of ``fn`` to differentiate.
        has_aux: Whether ``fn`` returns a pair of the loss and auxiliary data.

    Returns:
        A function ``(scale, *args, **kwargs) -> (value, grads)``. ``value`` is the unscaled loss in
        its own dtype, or the pair of that loss and the auxiliary data. ``grads`` are scaled: pass
        them to the ``update`` of an optimizer made with `dynamic_loss_scaling`.

    Raises:
        TypeError: ``fn`` is not callable, or ``argnums`` are not positions. At the call: the loss
            is not a floating scalar, or ``has_aux`` is set and ``fn`` returns no pair.
        ValueError: At the call: the optimizer state holds no loss scale or several, or the scale is
            not a finite number above 0.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast import dynamic_loss_scaling, scaled_value_and_grad
        >>> def loss(w, x):
        ...     return jnp.sum(w * x)
        >>> tx = dynamic_loss_scaling(optax.sgd(0.5), init_scale=1024.0)
        >>> w = jnp.ones(2)
        >>> opt_state = tx.init(w)
        >>> value, grads = scaled_value_and_grad(loss)(opt_state, w, jnp.array([1.0, 2.0]))
        >>> print(value, grads)
        3.0 [1024. 2048.]
        >>> updates, opt_state = tx.update(grads, opt_state, w)
        >>> print(optax.apply_updates(w, updates))
        [0.5 0. ]
    """
    if not callable(fn):
        raise TypeError(
            f"scaled_value_and_grad takes a function, got {shown(fn)}. Pass the scale and the "
            "parameters in a second call: scaled_value_and_grad(loss)(opt_state, params)."
        )
    positions = argnums if isinstance(argnums, Sequence) else (argnums,)
    if isinstance(argnums, str) or not all(hasattr(type(i), "__index__") for i in positions):
        raise TypeError(
            "argnums must be the position of an argument of the loss, or a sequence of several, "
            f"got {shown(argnums)}. The scale does not count."
        )

    def gradient_of(scaled: Callable[..., Any]) -> Callable[..., Any]:
        gradient = jax.grad(scaled, argnums, has_aux=True)

        def explained(*args: Any, **kwargs: Any) -> Any:
            try:
                return gradient(*args, **kwargs)
            except TypeError as error:
                if "not a valid JAX type" in str(error) or "grad requires" in str(error):
                    raise TypeError(
                        f"scaled_value_and_grad differentiates arrays of floats: {error} A model "
                        "may hold more: the functions of this name in "
                        "jmp_autocast.integrations.equinox and .nnx differentiate only its "
                        "parameters. Integers belong into another argument."
                    ) from error
                raise

        return explained

    return scaled_by(gradient_of, fn, has_aux)


def scaled_by(
    gradient_of: Callable[[Callable[..., Any]], Callable[..., Any]],
    fn: Callable[..., Any],
    has_aux: bool,
) -> Callable[..., Any]:
    """Returns ``scaled_value_and_grad(fn)`` for any gradient transformation, such as ``nnx.grad``.

    Args:
        gradient_of: The gradient transformation. It takes a function that returns a scalar and
            auxiliary data, and returns a function that returns gradients and the data.
        fn: As in `scaled_value_and_grad`.
        has_aux: As in `scaled_value_and_grad`.
    """

    @functools.wraps(fn)
    def value_and_scaled_grad(scale: Any, /, *args: Any, **kwargs: Any) -> Any:
        factor = _as_float32_scalar(scale, fn, args)

        @functools.wraps(fn)
        def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
            out = fn(*args, **kwargs)
            value = _checked_loss(out, has_aux, fn)
            # The product is float32, because a float16 loss of 2.0 times 2**15 would overflow. In
            # the backward pass, the cotangent of a float16 loss is the second factor in float16.
            wide = jnp.float32 if value.dtype.itemsize < 4 else value.dtype
            return value.astype(wide) * _cotangent(factor, value.dtype).astype(wide), out

        grads, out = gradient_of(scaled)(*args, **kwargs)
        dtype = jax.dtypes.result_type(out[0] if has_aux else out)
        if dtype.itemsize < 4:
            grads = _multiplied(grads, factor / _cotangent(factor, dtype))
        return out, grads

    return _with_signature(value_and_scaled_grad, fn)


def _as_float32_scalar(scale: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> jax.Array:
    """Returns the scale as a float32 scalar, from a number, an array or an optimizer state."""
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        check_scale(scale)
    if isinstance(scale, jax.Array | np.ndarray | np.generic | int | float | complex):
        dtype = jax.dtypes.result_type(scale)
        if jnp.shape(scale) or not is_real(dtype):
            raise ValueError(
                "scale must be a number, an array of shape () or an optimizer state; got an "
                f"array of shape {jnp.shape(scale)} and dtype {dtype}."
            )
        return jnp.asarray(scale, jnp.float32)
    check_order(scale, stacklevel=4)
    name = getattr(fn, "__name__", "loss")
    where = f", the first argument of scaled_value_and_grad({name})(opt_state, params, ...)"
    if holder := next((i for i, arg in enumerate(args, 2) if has_loss_scale(arg)), None):
        where += (
            f": argument {holder}, {a(type(args[holder - 2]).__name__)}, holds one, and comes first"
        )
    return jnp.asarray(only_loss_scale(scale, where).scale)


def _cotangent(factor: jax.Array, dtype: Any) -> jax.Array:
    """Returns the cotangent of a loss of dtype ``dtype``, with which the backward pass starts.

    For float32 and wider dtypes it is the scale. A 16-bit dtype holds only some scales: 65536 is
    infinite in float16, and 1000.3 would be rounded. So for a 16-bit dtype the cotangent is a power
    of two near the scale, within the normal range of the dtype.
    """
    if dtype.itemsize >= 4:
        return factor
    limits = jnp.finfo(dtype)
    largest = 2.0 ** math.floor(math.log2(float(limits.max)))  # 2**15 in float16
    # The cotangent is a power of two, so the later factor of the gradients, scale / cotangent, is
    # exact. A cast of the scale to ``dtype`` and back would not do, because XLA may remove it.
    power_of_two = lax.reduce_precision(factor, exponent_bits=8, mantissa_bits=0)
    return jnp.clip(power_of_two, float(limits.smallest_normal), largest)


def _multiplied(grads: Any, ratio: jax.Array) -> Any:
    """Multiplies floating and complex leaves by a scalar, in float32 or wider."""

    def multiplied(leaf: Any) -> Any:
        if not is_inexact(leaf):
            return leaf
        wide = at_least_float32(leaf)
        return (wide * ratio.astype(wide.dtype)).astype(leaf.dtype)

    return jax.tree.map(multiplied, grads)


def _checked_loss(out: Any, has_aux: bool, fn: Callable[..., Any]) -> jax.Array:
    """Returns the loss in a result of ``fn``; raises TypeError if it is no floating scalar."""
    name = getattr(fn, "__name__", repr(fn))
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
        found = "an array" if isinstance(out, jax.Array) else f"a {type(out).__name__}"
        raise TypeError(
            f"With has_aux=True, {name} must return a pair of the loss and auxiliary data; it "
            f"returns {found}."
        )
    value = out[0] if has_aux else out
    arrays = jax.Array | np.ndarray | np.generic | numbers.Number
    if not isinstance(value, arrays) and not hasattr(value, "__jax_array__"):
        found = f"is a {type(value).__name__}"
    else:
        value = jnp.asarray(value)
        if not value.shape and jnp.issubdtype(value.dtype, jnp.floating):
            return value
        found = f"has shape {value.shape} and dtype {value.dtype}"
    raise TypeError(
        f"The loss that {name} returns must be a floating array of shape (); it {found}. Where "
        f"{name} also returns auxiliary data, return a pair and pass has_aux=True."
    )


def _with_signature(wrapper: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the wrapper the signature of ``fn``, with a parameter for the scale in front."""
    # `jax.jit(wrapper, static_argnames=...)` reads the positions of names from the signature. The
    # signature that `functools.wraps` sets would be wrong, because it lacks the scale.
    signature = signature_of(fn)
    if signature is None:
        return wrapper
    # ``fn`` may have a parameter called `scale`, and two of one name are an error.
    first = "scale"
    while first in signature.parameters:
        first += "_"
    scale = inspect.Parameter(first, inspect.Parameter.POSITIONAL_ONLY)
    parameters = [scale, *signature.parameters.values()]
    wrapper.__signature__ = signature.replace(parameters=parameters)
    return wrapper
