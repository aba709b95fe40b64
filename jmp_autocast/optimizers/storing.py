"""The common part of the transformations that store weights in 16 bits.

A scheme computes float32 weights from the 16-bit weights and its state. The inner optimizer runs on
the float32 weights. The scheme rounds the updated weights to 16 bits and updates its state, for
example with the rounding errors. The transformation returns the updates with which
`optax.apply_updates` yields the rounded weights.
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
NOTHING = optax.MaskedNode()  # optax's placeholder for a leaf that a state leaves out


class Scheme(NamedTuple):
    """A way to store float32 weights in 16 bits.

    Attributes:
        name: The public function, for messages.
        state_type: The class of the transformation's state: a named tuple of the scheme's state and
            ``inner_state``.
        start: A function from the parameters to the scheme's first state.
        read: A function from the parameters and the scheme's state to the float32 parameters.
        write: A function from the parameters before a step, the scheme's state and the float32
            parameters after the step to the rounded 16-bit leaves (held in float32) and the new
            state.
    """

    name: str
    state_type: Any
    start: Callable[[Any], Any]
    read: Callable[[Any, Any], Any]
    write: Callable[[Any, Any, Any], tuple[Any, Any]]


def is_half(leaf: Any) -> bool:
    """Returns whether a leaf is a float16 or bfloat16 array."""
    return getattr(leaf, "dtype", None) in HALF_DTYPES


def as_wide(leaf: Any) -> Any:
    """Returns a float16 or bfloat16 array as float32, and any other value unchanged."""
    return leaf.astype(jnp.float32) if is_half(leaf) else leaf


def map_half(fn: Callable[..., Any], params: Any, *trees: Any) -> Any:
    """Maps a function over the 16-bit leaves of ``params`` and the matching leaves of ``trees``."""
    leaves, structure = jax.tree.flatten(params, is_leaf=is_masked)
    columns = [jax.tree.leaves(tree, is_leaf=is_masked) for tree in trees]
    rows = zip(leaves, *columns, strict=True)
    return structure.unflatten([fn(*row) if is_half(row[0]) else NOTHING for row in rows])


def is_masked(node: Any) -> bool:
    """Returns whether a node is the placeholder of a leaf that a state leaves out."""
    return isinstance(node, optax.MaskedNode)


def _is_variable(node: Any) -> bool:
    """Returns whether a node is a variable of Flax NNX: an array with metadata."""
    return hasattr(node, "set_metadata") and hasattr(node, "get_metadata")


def without_empty_variables(tree: Any) -> Any:
    """Returns a scheme's state without NNX variables that hold no array.

    Under a mesh, ``nnx.Optimizer`` reads the shape of each variable, which an empty one lacks.
    """

    def of(node: Any) -> Any:
        return NOTHING if _is_variable(node) and is_masked(node.get_value()) else node

    return jax.tree.map(of, tree, is_leaf=_is_variable)


def storing(
    inner: optax.GradientTransformation, scheme: Scheme
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that the weights are stored by a scheme."""
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"{scheme.name} wraps an optax gradient transformation such as optax.adam(1e-3), got "
            f"{inner!r}."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> Any:
        # The inner optimizer sees float32 parameters, so that its moments are float32.
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
        # Leaves that are not in 16 bits get the update of the inner optimizer unchanged.
        out = jax.tree.map(
            lambda p, new, move: difference(p, new) if is_half(p) else move, params, stored, moves
        )
        return out, scheme.state_type(without_empty_variables(kept), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def difference(param: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns the float32 update that turns a 16-bit parameter into a stored value.

    `optax.apply_updates` adds the update in float32 and rounds the sum, which gives exactly the
    stored value. The exception is a stored value below 2**-16 of the parameter: float32 cannot hold
    their difference, and the result is off by up to 2**-25 of the parameter.

    Args:
        param: float16 or bfloat16 array.
        stored: float32 array of values that the parameter's dtype holds.
    """
    wide = param.astype(jnp.float32)
    # An update of -0.0 keeps the sign of a parameter of -0.0.
    return jnp.where(stored == wide, -0.0, stored - wide)


def reached(param: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns the value of a parameter after the update of `difference`, as float32."""
    return to_nearest(param.astype(jnp.float32) + difference(param, stored), param.dtype)


def _check_call(scheme: Scheme, state: Any, params: Any) -> None:
    """Raises an error if the state or parameters of ``update`` do not fit the transformation."""
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
