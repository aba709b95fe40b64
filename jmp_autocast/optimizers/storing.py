"""What the transformations share that keep weights in 16 bits and compute their updates in float32.

A scheme reads float32 weights out of the 16-bit ones and what it keeps beside them. The inner
optimizer runs on those, in float32. The scheme then stores the sum of weights and updates, and the
transformation hands out what `optax.apply_updates` has to add for the stored weights to get there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .rounding import to_nearest

HALF_DTYPES = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))
NOTHING = optax.MaskedNode()  # optax's own stand-in for a leaf that a state does not have


class Scheme(NamedTuple):
    """How float32 weights are stored in 16 bits.

    Attributes:
        name: The public function, for messages.
        state_type: The named tuple of what is kept beside the weights, and ``inner_state``.
        start: From the parameters to what is kept.
        read: From parameters and what is kept to the parameters in float32.
        write: From the parameters before the step, what is kept, and the float32 parameters after
            it, to the stored values of 16-bit leaves, as float32, and what is kept.
    """

    name: str
    state_type: Any
    start: Callable[[Any], Any]
    read: Callable[[Any, Any], Any]
    write: Callable[[Any, Any, Any], tuple[Any, Any]]


def is_half(leaf: Any) -> bool:
    """True for a float16 or bfloat16 array."""
    return getattr(leaf, "dtype", None) in HALF_DTYPES


def as_wide(leaf: Any) -> Any:
    """Returns a float16 or bfloat16 array as float32, anything else as it is."""
    return leaf.astype(jnp.float32) if is_half(leaf) else leaf


def map_half(fn: Callable[..., Any], params: Any, *trees: Any) -> Any:
    """Maps a function over the 16-bit leaves of a tree.

    Args:
        fn: Takes a leaf of ``params`` and what stands at its place in each of the other trees.
        params: A pytree of arrays.
        trees: Trees of the same structure, down to the leaves of ``params``.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=is_masked)
    columns = [jax.tree.leaves(tree, is_leaf=is_masked) for tree in trees]
    rows = zip(leaves, *columns, strict=True)
    return structure.unflatten([fn(*row) if is_half(row[0]) else NOTHING for row in rows])


def is_masked(node: Any) -> bool:
    """True for a leaf that a state does not have."""
    return isinstance(node, optax.MaskedNode)


def _is_variable(node: Any) -> bool:
    """Returns whether a node is a variable of Flax NNX: an array with metadata."""
    return hasattr(node, "set_metadata") and hasattr(node, "get_metadata")


def without_empty_variables(tree: Any) -> Any:
    """Returns what a state keeps, where Flax NNX has no variables that hold nothing.

    An ``nnx.Optimizer`` that is made under a mesh asks each of its variables for a shape.
    """

    def of(node: Any) -> Any:
        return NOTHING if _is_variable(node) and is_masked(node.get_value()) else node

    return jax.tree.map(of, tree, is_leaf=_is_variable)


def storing(
    inner: optax.GradientTransformation, scheme: Scheme
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation that keeps weights as a scheme says.

    Args:
        inner: The optimizer that computes the updates, in float32.
        scheme: How weights are stored.

    Raises:
        TypeError: ``inner`` is no gradient transformation.
    """
    check_transformation(scheme.name, inner)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> Any:
        # The inner optimizer sees float32 parameters: its moments are float32.
        kept = without_empty_variables(scheme.start(params))
        return scheme.state_type(kept, inner.init(jax.tree.map(as_wide, params)))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        check_call(scheme, state, params)
        kept, inner_state = state
        wide = scheme.read(params, kept)
        moves, inner_state = inner.update(
            jax.tree.map(as_wide, updates), inner_state, wide, **extra_args
        )
        target = jax.tree.map(lambda p, u: p + u.astype(p.dtype), wide, moves)
        stored, kept = scheme.write(params, kept, target)
        # A leaf that is no 16-bit one gets the update of the inner optimizer, to the bit.
        out = jax.tree.map(
            lambda p, new, move: difference(p, new) if is_half(p) else move, params, stored, moves
        )
        return out, scheme.state_type(without_empty_variables(kept), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def difference(param: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns the float32 update that takes a 16-bit parameter to a stored value.

    `optax.apply_updates` adds it in float32 and rounds the sum. That gives the stored value to the
    bit, unless it is less than 2**-16 of the parameter: then it is off by up to 2**-25 of what the
    parameter was, for no float32 number is the difference of the two.

    Args:
        param: float16 or bfloat16 array.
        stored: float32 array of values that the parameter's dtype holds.
    """
    wide = param.astype(jnp.float32)
    # -0.0 keeps the sign of a parameter of -0.0.
    return jnp.where(stored == wide, -0.0, stored - wide)


def reached(param: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns what a parameter is after its update, as float32; see `difference`."""
    return to_nearest(param.astype(jnp.float32) + difference(param, stored), param.dtype)


def check_transformation(name: str, inner: Any) -> None:
    """Raises TypeError for what is no gradient transformation."""
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"{name} wraps an optax gradient transformation such as optax.adam(1e-3), got "
            f"{inner!r}."
        )


def check_call(scheme: Scheme, state: Any, params: Any) -> None:
    """Raises for arguments of ``update`` that are not those of the transformation.

    Raises:
        TypeError: The state is another transformation's.
        ValueError: There are no parameters, or the state was made for parameters of other dtypes.
    """
    name, kind = scheme.name, scheme.state_type.__name__
    if not isinstance(state, scheme.state_type):
        raise TypeError(
            f"The state that {name} updates must be a {kind}, from its init or its last update; "
            f"got {type(state).__name__}. The arguments of update are (gradients, state, params)."
        )
    if params is None:
        raise ValueError(
            f"{name} needs the parameters, in whose dtype they are stored: call "
            "update(gradients, state, params)."
        )
    kept = without_empty_variables(jax.eval_shape(scheme.start, params))
    expected = jax.tree.structure(kept)
    if jax.tree.structure(state[0]) != expected:
        raise ValueError(
            f"This {kind} was made for parameters of another structure, or with other leaves in 16 "
            f"bits. {_instead(state[0], params)}"
        )


def _instead(kept: Any, params: Any) -> str:
    """Returns what to do about parameters that a state was not made for."""
    held, leaves = jax.tree.leaves(kept, is_leaf=is_masked), jax.tree.leaves(params)
    if len(held) == len(leaves) and any(
        not is_masked(own) and getattr(leaf, "dtype", None) == jnp.float32
        for own, leaf in zip(held, leaves, strict=True)
    ):
        return (
            "Parameters that were in 16 bits are float32: the updates are float32, and "
            "eqx.apply_updates adds them. Write optax.apply_updates, which keeps the dtype, or "
            "apply_gradients of jmp_autocast.integrations.equinox."
        )
    return (
        "Call init with the parameters as they are trained, 16-bit leaves included; start_from "
        "puts the digits of float32 weights into the state."
    )
