"""The common part of transformations that store weights in 16 bits and update them in float32.

A scheme computes float32 weights from the 16-bit ones and its own state. The inner optimizer runs
on those, in float32. The scheme then stores the sum of weights and updates, and the transformation
returns the updates for which `optax.apply_updates` returns the stored weights.
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
NOTHING = optax.MaskedNode()  # optax's own value for a leaf that a state does not have


class Scheme(NamedTuple):
    """A way to store float32 weights in 16 bits.

    Attributes:
        name: The public function, for messages.
        state_type: The named tuple of the scheme's state and ``inner_state``.
        start: From the parameters to the scheme's state.
        read: From the parameters and the scheme's state to the parameters in float32.
        write: From the parameters before the step, the scheme's state, and the float32 parameters
            after it, to the stored values of 16-bit leaves, as float32, and the new state.
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
    """Returns a float16 or bfloat16 array as float32, and any other value unchanged."""
    return leaf.astype(jnp.float32) if is_half(leaf) else leaf


def map_half(fn: Callable[..., Any], params: Any, *trees: Any) -> Any:
    """Maps a function over the 16-bit leaves of a tree, and the same leaves of other trees."""
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
    """Returns a scheme's state without NNX variables that hold no array.

    An ``nnx.Optimizer`` that is made under a mesh needs the shape of each of its variables.
    """

    def of(node: Any) -> Any:
        return NOTHING if _is_variable(node) and is_masked(node.get_value()) else node

    return jax.tree.map(of, tree, is_leaf=_is_variable)


def storing(
    inner: optax.GradientTransformation, scheme: Scheme
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation of an optimizer that stores weights by a scheme."""
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"{scheme.name} wraps an optax gradient transformation such as optax.adam(1e-3), got "
            f"{inner!r}."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> Any:
        # The inner optimizer sees float32 parameters: its moments are float32.
        kept = without_empty_variables(scheme.start(params))
        return scheme.state_type(kept, inner.init(jax.tree.map(as_wide, params)))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        _check_call(scheme, state, params)
        kept, inner_state = state
        wide = scheme.read(params, kept)
        moves, inner_state = inner.update(
            jax.tree.map(as_wide, updates), inner_state, wide, **extra_args
        )
        target = jax.tree.map(lambda p, u: p + u.astype(p.dtype), wide, moves)
        stored, kept = scheme.write(params, kept, target)
        # Other leaves get the update of the inner optimizer, to the bit.
        out = jax.tree.map(
            lambda p, new, move: difference(p, new) if is_half(p) else move, params, stored, moves
        )
        return out, scheme.state_type(without_empty_variables(kept), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def difference(param: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns the float32 update that takes a 16-bit parameter to a stored value.

    `optax.apply_updates` adds it in float32 and rounds the sum. The result is the stored value to
    the bit, unless that is less than 2**-16 of the parameter: then it is off by up to 2**-25 of the
    old parameter, because no float32 number is the difference of the two.

    Args:
        param: float16 or bfloat16 array.
        stored: float32 array of values that the parameter's dtype holds.
    """
    wide = param.astype(jnp.float32)
    # -0.0 keeps the sign of a parameter of -0.0.
    return jnp.where(stored == wide, -0.0, stored - wide)


def reached(param: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns a parameter after its update, as float32; see `difference`."""
    return to_nearest(param.astype(jnp.float32) + difference(param, stored), param.dtype)


def _check_call(scheme: Scheme, state: Any, params: Any) -> None:
    """Raises for arguments of ``update`` that do not belong to the transformation."""
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
    if jax.tree.structure(state[0]) != jax.tree.structure(kept):
        raise ValueError(
            f"This {kind} was made for parameters of another structure, or with other leaves in 16 "
            "bits. Call init with the parameters as they are trained, 16-bit leaves included; "
            "start_from puts the digits of float32 weights into the state. If eqx.apply_updates "
            "made 16-bit parameters float32, write optax.apply_updates, which keeps the dtype, or "
            "apply_gradients of jmp_autocast.integrations.equinox."
        )
