"""Conversion between float32 weights and 16-bit weights with their optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .storing import as_wide, is_half, is_masked, map_half
from .weights import (
    WIDE_READERS,
    KahanState,
    MasterWeightsState,
    StochasticRoundingState,
    missing,
)


def as_float32(params: Any) -> Any:
    """Returns parameters with their 16-bit leaves cast to float32, so that gradients are float32.

    JAX returns a gradient in the dtype of its parameter, so the gradient of a bfloat16 weight is
    rounded to 8 bits of precision. The gradient of a widened weight is the float32 accumulator of
    the matmul: ``jax.grad(autocast(loss))(as_float32(params), batch)``. Under ``jit``, a weight
    that `autocast` reads only in 16 bits gets no float32 copy: XLA removes the cast to float32 and
    back.

    Args:
        params: A pytree of arrays. Leaves that are neither float16 nor bfloat16 are not changed.

    Returns:
        A pytree of the same structure.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import BF16, autocast
        >>> from jmp_autocast.optimizers import as_float32
        >>> loss = autocast(lambda params, x: jnp.sum(x @ params["w"]), policy=BF16)
        >>> params, x = {"w": jnp.ones((8, 8), jnp.bfloat16)}, jnp.ones((2, 8))
        >>> jax.grad(loss)(params, x)["w"].dtype, jax.grad(loss)(as_float32(params), x)["w"].dtype
        (dtype(bfloat16), dtype('float32'))
    """
    return jax.tree.map(as_wide, params)


def float32_params(opt_state: Any, params: Any) -> Any:
    """Returns the float32 weights of a run with all their digits, for a checkpoint or an average.

    Args:
        opt_state: An optimizer state that holds, at any depth, one state of `master_weights`,
            `kahan_summation` or `stochastic_rounding`.
        params: The parameters that belong to this state.

    Returns:
        The parameters with float32 in place of 16-bit leaves: the master weights of
        `master_weights`, the sums of weights and compensations of `kahan_summation`, or the stored
        weights of `stochastic_rounding`.

    Raises:
        ValueError: ``opt_state`` holds no such state, or several.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import float32_params, master_weights
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> updates, state = tx.update(jnp.ones(1), tx.init(params), params)
        >>> print(optax.apply_updates(params, updates), float32_params(state, params))
        [1] [0.999]
    """
    states = [s for s in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(s)]
    if len(states) != 1:
        raise ValueError(
            f"{len(states)} states in this {type(opt_state).__name__} keep weights in 16 bits, and "
            "there must be one, of master_weights(...), kahan_summation(...) or "
            "stochastic_rounding(...)."
        )
    (state,) = states
    own = _own(params, state)
    found = WIDE_READERS[type(state)](own, state[0])
    # For a leaf that the state leaves out, the stored parameter has all the digits.
    return jax.tree.map(lambda p, w: as_wide(p) if is_masked(w) else w, params, found)


def start_from(opt_state: Any, params: Any, wide: Any) -> Any:
    """Puts the digits of float32 weights into a new optimizer state, before the first step.

    Without this call, a run starts from the weights rounded to 16 bits.

    Args:
        opt_state: The result of ``init`` for ``params``, with a `MasterWeightsState` or
            `KahanState` at any depth.
        params: The stored parameters.
        wide: The float32 weights, whose rounded values are the 16-bit leaves of ``params``.

    Returns:
        The state, with ``wide`` as its master weights or with the rounding errors as its
        compensation.

    Raises:
        ValueError: ``wide`` differs from ``params`` in structure or shapes, or is not float32 where
            ``params`` is in 16 bits.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import master_weights, start_from
        >>> wide = jnp.full(1, 0.1)
        >>> params = wide.astype(jnp.bfloat16)
        >>> state = master_weights(optax.sgd(0.1)).init(params)
        >>> print(state.master_params, start_from(state, params, wide).master_params)
        [0.10009766] [0.1]
    """
    _check_wide(params, wide)

    def begin(state: Any) -> Any:
        if isinstance(state, MasterWeightsState):
            # The weights are copied, because a step that donates its state would delete the
            # caller's weights.
            copies = map_half(lambda _, w: jnp.array(w), _own(params, state), _own(wide, state))
            return state._replace(master_params=copies)
        if isinstance(state, KahanState):
            own = map_half(missing, _own(params, state), _own(wide, state))
            return state._replace(compensation=own)
        return state

    return jax.tree.map(begin, opt_state, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    return isinstance(node, tuple(WIDE_READERS))


def _own(params: Any, state: Any) -> Any:
    """Returns ``params`` with a placeholder for each leaf that ``state`` leaves out.

    Inside ``optax.masked`` or ``optax.multi_transform``, an optimizer has a state for only a part
    of the parameters.
    """
    if isinstance(state, StochasticRoundingState):
        return params
    return jax.tree.map(lambda p, held: held if is_masked(held) else p, params, state[0])


def _check_wide(params: Any, wide: Any) -> None:
    if jax.tree.structure(params) != jax.tree.structure(wide):
        raise ValueError("start_from needs params and wide in one structure, and they differ.")

    def check(path: Any, param: Any, weight: Any) -> None:
        expected = jnp.shape(param), jnp.dtype(jnp.float32)
        found = jnp.shape(weight), jnp.result_type(weight)
        if is_half(param) and found != expected:
            raise ValueError(
                f"start_from needs the float32 weights of shape {expected[0]} at "
                f"{jax.tree_util.keystr(path)} of wide, got {found[1].name}{list(found[0])}."
            )

    jax.tree_util.tree_map_with_path(check, params, wide)
