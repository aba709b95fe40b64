"""The optax transformations for weights that are stored in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .draws import as_key, split
from .rounding import stochastically, to_nearest
from .storing import Scheme, as_wide, is_half, map_half, reached, storing

# The compensations of float16 weights are bfloat16, too. In float16 they would have two bits: the
# smallest float16 number is 6e-8, and the rounding error of a weight near 1e-3 is at most 2e-7.
_COMPENSATION = np.dtype(jnp.bfloat16)


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        master_params: The float32 weights, with an ``optax.MaskedNode`` in place of each leaf that
            is not stored in 16 bits.
        inner_state: The state of the inner transformation, made for float32 weights.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import master_weights
        >>> state = master_weights(optax.sgd(0.1)).init(jnp.ones(2, jnp.bfloat16))
        >>> state.master_params.dtype
        dtype('float32')
    """

    stores_16_bits = True  # loss scaling leaves 16-bit weights as they are

    master_params: Any
    inner_state: optax.OptState


class KahanState(NamedTuple):
    """State of `kahan_summation`.

    Attributes:
        compensation: The rounding errors of the weights in bfloat16, with an ``optax.MaskedNode``
            in place of each leaf that is not stored in 16 bits.
        inner_state: The state of the inner transformation, made for float32 weights.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import kahan_summation
        >>> print(kahan_summation(optax.sgd(0.1)).init(jnp.ones(2, jnp.bfloat16)).compensation)
        [0 0]
    """

    stores_16_bits = True

    compensation: Any
    inner_state: optax.OptState


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
        key: The PRNG key of the next step, as the ``uint32[2]`` data of a threefry key, which every
            checkpoint library can save.
        inner_state: The state of the inner transformation, made for float32 weights.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import stochastic_rounding
        >>> print(stochastic_rounding(optax.sgd(0.1), seed=3).init(jnp.ones(2)).key)
        [0 3]
    """

    stores_16_bits = True

    key: jax.Array
    inner_state: optax.OptState


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit weights train like float32 weights.

    The float32 weights are in the optimizer state, 4 bytes per weight; the program reads 16-bit
    copies. In bfloat16 the next number above 1 is 0.0078 away, and an update below half of this
    distance has no effect; in the master weights such updates add up. With float32 gradients
    (`as_float32`) the run equals a run with float32 weights, bit for bit if XLA fuses the
    multiplications and additions of the optimizer in the same way in both programs. The exception
    is a weight that shrinks to 2**-16 of its value in one step (`storing.difference`).

    Float32 weights get the updates of ``inner`` unchanged. A 16-bit gradient is cast to float32
    first. The transformation comes last in a chain: a transformation after it would change only the
    stored weights. ``optax.MultiSteps``, clipping and weight decay belong inside, in float32;
    `jmp_autocast.dynamic_loss_scaling` belongs around it.

    Args:
        inner: Any optax transformation. Its state is made for float32 weights.

    Returns:
        An ``optax.GradientTransformationExtraArgs`` with a `MasterWeightsState`. Updates of 16-bit
        weights are float32: ``optax.apply_updates`` rounds the sum to 16 bits, but
        ``eqx.apply_updates`` returns float32 weights. For Equinox, use
        `jmp_autocast.integrations.equinox.apply_gradients`.

    Raises:
        TypeError: ``inner`` is not a gradient transformation. At ``update``: the state is from
            another transformation.
        ValueError: At ``update``: the parameters are missing, or the state was made for other
            parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import master_weights
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> tx = master_weights(optax.sgd(1e-3))
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update(jnp.ones(1), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params, params.dtype, f"{float(state.master_params[0]):.3f}")
        [0.898438] bfloat16 0.900
    """

    def start(params: Any) -> Any:
        return map_half(lambda p: p.astype(jnp.float32), params)

    def write(params: Any, _: Any, target: Any) -> tuple[Any, Any]:
        stored = map_half(lambda p, t: to_nearest(t, p.dtype), params, target)
        return stored, map_half(lambda _, t: t, params, target)

    return storing(inner, Scheme("master_weights", MasterWeightsState, start, _master, write))


def _master(params: Any, master: Any) -> Any:
    return _wide(lambda _, m: m, params, master)


def kahan_summation(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit weights keep small updates, with 2 more bytes per weight.

    The rounding error of a weight is kept in bfloat16, and added to the weight before the next
    step. The weight and its error are together within 2**-17 of the exact sum (2**-20 for a float16
    weight), so an update below this share of its weight may have no effect. Everything else is as
    in `master_weights`.

    Args:
        inner: Any optax transformation. Its state is made for float32 weights.

    Returns:
        An ``optax.GradientTransformationExtraArgs`` with a `KahanState`. As with `master_weights`,
        apply its updates by ``optax.apply_updates``, not by ``eqx.apply_updates``.

    Raises:
        TypeError: As in `master_weights`.
        ValueError: As in `master_weights`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import float32_params, kahan_summation
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> tx = kahan_summation(optax.sgd(1e-3))
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update(jnp.ones(1), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params, f"{float(float32_params(state, params)[0]):.3f}")
        [0.898438] 0.900
    """

    def start(params: Any) -> Any:
        return map_half(lambda p: jnp.zeros_like(p, _COMPENSATION), params)

    def write(params: Any, _: Any, target: Any) -> tuple[Any, Any]:
        stored = map_half(lambda p, t: to_nearest(t, p.dtype), params, target)
        # The compensation is relative to the weight after the update, which may differ from
        # ``stored`` (see `difference`).
        new = map_half(reached, params, stored)
        return stored, map_half(lambda _, t, n: (t - n).astype(_COMPENSATION), params, target, new)

    scheme = Scheme("kahan_summation", KahanState, start, _compensated, write)
    return storing(inner, scheme)


def missing(param: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the rounding error of a 16-bit parameter against its float32 weight, in bfloat16."""
    return (weight - param.astype(jnp.float32)).astype(_COMPENSATION)


def _compensated(params: Any, compensation: Any) -> Any:
    return _wide(lambda p, c: p.astype(jnp.float32) + c.astype(jnp.float32), params, compensation)


def stochastic_rounding(
    inner: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit weights keep small updates on average, with no more bytes.

    The sum of weight and update is rounded at random to one of the two nearest 16-bit numbers. The
    nearer number has the higher probability, so that the mean of the result is the sum. An update
    of a hundredth of the distance to the neighbor moves one weight in a hundred. A weight that gets
    no update stays. Everything else is as in `master_weights`.

    Args:
        inner: Any optax transformation. Its state is made for float32 weights.
        seed: The first PRNG key. Equal seeds give equal bits, on any number of devices.

    Returns:
        An ``optax.GradientTransformationExtraArgs`` with a `StochasticRoundingState`. As with
        `master_weights`, apply its updates by ``optax.apply_updates``, not by
        ``eqx.apply_updates``.

    Raises:
        TypeError: As in `master_weights`; or ``seed`` is no integer.
        ValueError: As in `master_weights`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast.optimizers import stochastic_rounding
        >>> params = jnp.ones(10_000, jnp.bfloat16)
        >>> tx = stochastic_rounding(optax.sgd(1e-3))
        >>> updates, state = tx.update(jnp.ones(10_000), tx.init(params), params)
        >>> params = optax.apply_updates(params, updates)
        >>> print(sorted(set(params.tolist())), round(float(params.astype(float).mean()), 4))
        [0.99609375, 1.0] 0.999
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"stochastic_rounding takes an integer as its seed, got {seed!r}.")

    def start(_: Any) -> jax.Array:
        # The key is always threefry, whose bits do not depend on the sharding of an array. It is
        # stored as data, which pickle and flax.serialization can save.
        return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))

    def write(params: Any, key: jax.Array, target: Any) -> tuple[Any, jax.Array]:
        leaves, structure = jax.tree.flatten(params)
        key, own = jax.random.key_data(jax.random.split(as_key(key)))
        keys = structure.unflatten([as_key(one) for one in split(own, len(leaves))])
        stored = map_half(lambda p, t, k: stochastically(k, t, p.dtype), params, target, keys)
        return stored, key

    scheme = Scheme("stochastic_rounding", StochasticRoundingState, start, _as_stored, write)
    return storing(inner, scheme)


def _as_stored(params: Any, _: Any) -> Any:
    return jax.tree.map(as_wide, params)


def _wide(weight: Callable[..., Any], params: Any, kept: Any) -> Any:
    """Returns ``params`` with float32 weights, made by ``weight``, in place of 16-bit leaves."""
    return jax.tree.map(lambda p, w: w if is_half(p) else p, params, map_half(weight, params, kept))


WIDE_READERS: dict[type[Any], Callable[[Any, Any], Any]] = {
    MasterWeightsState: _master,
    KahanState: _compensated,
    StochasticRoundingState: _as_stored,
}
