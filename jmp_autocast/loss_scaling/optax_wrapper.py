"""Optax transformations that unscale gradients, skip bad steps and adapt the loss scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from ..policies.errors import shown, with_usage
from .float16_weights import as_read_by, float32_state
from .scale import ScaleState, adjusted, dynamic_scale, static_scale
from .unscale import AxisName, all_finite, unscale


class LossScalingState(NamedTuple):
    """State of `dynamic_loss_scaling` and `static_loss_scaling`.

    Attributes:
        loss_scale: A named tuple of scalar arrays: ``scale`` (float32), by which the loss is
            multiplied; ``good_steps`` (int32), the finite steps in a row since the scale last
            changed; ``consecutive_skips`` and ``skipped_steps`` (int32), the steps skipped in a row
            and since the start; and the arguments of `dynamic_loss_scaling`: ``growth_factor``,
            ``backoff_factor``, ``growth_interval``, ``min_scale`` and ``max_scale``.
        inner_state: The state of the inner transformation.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast import dynamic_loss_scaling
        >>> state = dynamic_loss_scaling(optax.sgd(0.1, momentum=0.9)).init(jnp.ones(2))
        >>> print(state.loss_scale.scale, state.inner_state[0].trace)
        65536.0 [0. 0.]
    """

    loss_scale: ScaleState
    inner_state: optax.OptState


@with_usage("dynamic_loss_scaling(optax.adam(1e-3)), and options such as init_scale= by keyword")
def dynamic_loss_scaling(
    inner: optax.GradientTransformation,
    *,
    init_scale: ArrayLike = 2.0**16,
    growth_factor: ArrayLike = 2.0,
    backoff_factor: ArrayLike = 0.5,
    growth_interval: ArrayLike = 2000,
    min_scale: ArrayLike = 1.0,
    max_scale: ArrayLike = 2.0**24,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it takes gradients of a scaled loss and adapts the scale.

    ``update`` divides the gradients by the scale in float32. If all quotients are finite, ``inner``
    runs on them. If one is not finite, the step is skipped: the updates are -0.0 (so that even a
    parameter of -0.0 keeps its bits), the state of ``inner`` keeps its bits, and the scale backs
    off. After ``growth_interval`` finite steps in a row the scale grows. The defaults are those of
    PyTorch's ``GradScaler``, whose scale has no bounds and can sink to 0, after which every
    parameter becomes NaN.

    A transformation inside ``inner`` sees unscaled gradients, so ``optax.clip_by_global_norm``
    belongs there. A transformation chained before the wrapper sees scaled gradients, and
    `scaled_value_and_grad` warns. The check for finite gradients then applies to the results of
    that transformation.

    ``optax.MultiSteps`` belongs inside as well: it then adds up unscaled gradients, without those
    of a skipped micro-batch. If it is around the wrapper, its accumulator keeps a NaN forever
    (optax 0.2.8 resets it by multiplying it with zero). If the program itself adds up gradients
    before an ``update``, one bad gradient skips the whole sum. ``optax.apply_if_finite`` also
    belongs inside: around the wrapper, it hides bad steps from the scale.

    ``inner`` gets float16 parameters in float32, and keeps float32 moments for them: in float16,
    Adam's second moment of gradients below 5e-3 is zero. Updates of 16-bit parameters are float32:
    ``optax.apply_updates`` rounds the sum to 16 bits, while ``eqx.apply_updates`` returns float32
    parameters. `jmp_autocast.optimizers.master_weights` inside the wrapper keeps the rounded
    digits.

    ``init`` stores the arguments in the state, and so in checkpoints:
    ``state.loss_scale._replace(growth_interval=jnp.int32(500))`` changes one without a
    recompilation. An argument that is a JAX array replaces its stored value in each ``update``, as
    ``optax.inject_hyperparams`` needs.

    Args:
        inner: Any optax transformation. It gets the extra arguments of ``update`` unchanged, except
            ``grad`` (for line searches), which is unscaled like the gradients.
        init_scale: The first scale, within ``[min_scale, max_scale]``.
        growth_factor: The factor by which the scale grows; above 1.
        backoff_factor: The factor by which a skipped step multiplies the scale; between 0 and 1.
        growth_interval: Consecutive finite steps after which the scale grows; an integer of at
            least 1.
        min_scale: Lower bound; a normal float32 number above 0.
        max_scale: Upper bound; a finite float32 number.
        axis_name: The mapped axis or axes of ``shard_map`` or ``pmap``: if one shard has a bad
            gradient, all skip the step. Sharded arrays under ``jit`` need no name.

    Returns:
        An ``optax.GradientTransformationExtraArgs`` with a `LossScalingState`.

    Raises:
        TypeError: ``inner`` is not a gradient transformation, or an argument is not a number. At
            ``update``: the state is not one that ``init`` or ``update`` returned.
        ValueError: An argument is out of range. JAX arrays are not checked: their values may be
            unknown before the program runs.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast import dynamic_loss_scaling, scaled_value_and_grad
        >>> from jmp_autocast.loss_scaling import loss_scale, step_skipped
        >>> tx = dynamic_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
        >>> params = {"w": jnp.ones(2)}
        >>> opt_state = tx.init(params)
        >>> @jax.jit
        ... def train_step(params, opt_state, x):
        ...     loss = lambda params: jnp.sum(params["w"] * x)
        ...     value, grads = scaled_value_and_grad(loss)(opt_state, params)
        ...     updates, opt_state = tx.update(grads, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state, value
        >>> params, opt_state, value = train_step(params, opt_state, jnp.array([1.0, jnp.inf]))
        >>> print(params["w"], step_skipped(opt_state), loss_scale(opt_state))
        [1. 1.] True 32768.0
    """
    make_scale = functools.partial(
        dynamic_scale,
        init_scale,  # passed by position, because no field of the state has this name
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    return _loss_scaling("dynamic_loss_scaling", inner, make_scale, axis_name)


@with_usage("static_loss_scaling(optax.adam(1e-3), 1024.0), and options by keyword")
def static_loss_scaling(
    inner: optax.GradientTransformation,
    scale: ArrayLike,
    *,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it takes gradients of a loss times a constant scale.

    It skips steps whose gradients are not finite, as `dynamic_loss_scaling` does.

    Args:
        inner: Any optax transformation.
        scale: The scale; a normal, finite float32 number above 0.
        axis_name: As in `dynamic_loss_scaling`.

    Returns:
        An ``optax.GradientTransformationExtraArgs`` with a `LossScalingState`.

    Raises:
        TypeError: ``inner`` is not a gradient transformation, or ``scale`` is not a number.
        ValueError: ``scale`` is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from jmp_autocast import static_loss_scaling
        >>> tx = static_loss_scaling(optax.sgd(1.0), 128.0)
        >>> updates, _ = tx.update(jnp.array([256.0]), tx.init(jnp.ones(1)))
        >>> print(updates)
        [-2.]
    """
    make_scale = functools.partial(static_scale, scale)
    return _loss_scaling("static_loss_scaling", inner, make_scale, axis_name)


def _loss_scaling(
    name: str,
    inner: optax.GradientTransformation,
    make_scale: functools.partial[ScaleState],
    axis_name: AxisName,
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation for `dynamic_loss_scaling` or `static_loss_scaling`.

    Args:
        name: The public function, for error messages.
        inner: The transformation that gets the unscaled gradients.
        make_scale: A function that returns the scale before the first step.
        axis_name: As in `dynamic_loss_scaling`.
    """
    make_scale()  # raises errors about the arguments now, not in `init`
    # optax.inject_hyperparams makes a new transformation in each step, whose arguments are traced
    # arrays with the values for this step. These replace the values in the state. A plain number
    # does not, or `state._replace(growth_interval=...)` would have no effect.
    arrays = {key: x for key, x in make_scale.keywords.items() if isinstance(x, jax.Array)}
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"{name} wraps an optax gradient transformation such as optax.adam(1e-3), got "
            f"{shown(inner)}.{_instead(inner)}"
        )
    if not isinstance(axis_name, Hashable):
        raise TypeError(
            f"axis_name must be the name of a mapped axis or a tuple of names, got "
            f"{shown(axis_name)}."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LossScalingState:
        return LossScalingState(make_scale(), float32_state(inner.init(params), params))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScalingState]:
        if not isinstance(state, LossScalingState):
            raise TypeError(
                f"The state that {name} updates must be a LossScalingState, from its init or its "
                f"last update; got {type(state).__name__}. The arguments of update are (gradients, "
                "state, params)."
            )
        scale = state.loss_scale._replace(**arrays)
        divisor = jnp.asarray(scale.scale, jnp.float32)
        finite = all_finite(divisor, updates, axis_name)

        # `run` divides the gradients again, after `all_finite`: XLA fuses this division into the
        # optimizer, and stores no float32 copy of the gradients. `run` is jitted so that the
        # optimizer is traced once, although `_if_finite` calls it twice.
        @jax.jit
        def run(grads: optax.Updates, inner_state: optax.OptState) -> tuple[Any, Any]:
            unscaled = {n: unscale(divisor, extra_args[n]) for n in ("grad",) if n in extra_args}
            own = as_read_by(inner_state, params)
            updates, new_inner_state = inner.update(
                unscale(divisor, grads), inner_state, own, **(extra_args | unscaled)
            )
            return updates, jax.tree.map(_with_dtype_of, inner_state, new_inner_state)

        updates, inner_state = _if_finite(finite, run, updates, state.inner_state)
        return updates, LossScalingState(adjusted(scale, finite), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _instead(inner: Any) -> str:
    """Returns the fix to suggest for a value that is no optax transformation."""
    if isinstance(inner, type) or callable(inner):
        name = getattr(inner, "__name__", "")
        return f" Call it first: {name}(...)." if hasattr(optax, name) else ""
    if hasattr(inner, "opt_state") and hasattr(inner, "tx"):
        return " Wrap the optimizer of the state: tx=dynamic_loss_scaling(optax.adam(1e-3))."
    if type(inner).__module__.startswith("keras."):
        return " Keras has keras.optimizers.LossScaleOptimizer(optimizer) for its own."
    return ""


def _if_finite(
    finite: jax.Array, run: Callable[..., Any], grads: optax.Updates, inner_state: optax.OptState
) -> tuple[optax.Updates, optax.OptState]:
    """Runs the optimizer if the gradients are finite; otherwise keeps its state.

    There are two forms with the same results. A conditional skips the optimizer; a selection always
    runs it, and drops its results if the gradients are not finite.

    Args:
        finite: bool scalar.
        run: The optimizer, a jitted function ``(grads, inner_state) -> (updates, inner_state)``.
        grads: The scaled gradients.
        inner_state: The state of the optimizer.
    """

    def skip(grads: optax.Updates, inner_state: optax.OptState) -> tuple[Any, Any]:
        return jax.tree.map(_update_of_nothing, out_types), inner_state

    def conditional(*operands: Any) -> tuple[Any, Any]:
        return lax.cond(finite, run, skip, *operands)

    def selection(*operands: Any) -> tuple[Any, Any]:
        return jax.tree.map(functools.partial(_select, finite), run(*operands), skip(*operands))

    program, (out_types, _) = jax.make_jaxpr(run, return_shape=True)(grads, inner_state)
    if not _may_run_on_bad_gradients(program):
        return conditional(grads, inner_state)
    # The bytes that a step moves, relative to plain adamw with 124M parameters on a TPU v5e, are
    # 1.57 with the conditional and 1.14 with the selection. The selection adds one pass over the
    # gradients, for the check; around clip and adamw it adds nothing, because the norm and the
    # check share a pass. The conditional also stores the updates that it returns (498 MB). On an
    # H100 both forms move 1.14. XLA:CPU fuses the selection badly: a step takes 4.7 times as long
    # as adam, and 2.5 times with the conditional (benchmarks/compilers, loss_scale.py).
    return lax.platform_dependent(grads, inner_state, cpu=conditional, default=selection)


def _may_run_on_bad_gradients(jaxpr: Any) -> bool:
    """Returns whether it is safe to run an optimizer's jaxpr on NaN and infinite gradients."""
    # An effect, such as `jax.debug.print`, would also happen on a skipped step. A `while`, as in a
    # line search, may never end: a NaN never falls below a bound.
    if jaxpr.effects:
        return False
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            return False
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") and not _may_run_on_bad_gradients(inner):
                    return False
    return True


def _select(finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the bits of ``new`` if ``finite`` is True, else those of ``old``."""
    # `jnp.where` adds a jitted call for each leaf: 148 arrays took 0.95 s to trace, not 0.81.
    return lax.select_n(finite, old, new)


def _update_of_nothing(leaf: Any) -> jax.Array:
    """Returns an update that keeps every bit of its parameter."""
    # -0.0 + -0.0 is -0.0, and 0.0 + -0.0 is 0.0. An update of 0.0 would turn -0.0 into 0.0.
    zeros = jnp.zeros_like(leaf)
    return -zeros if jnp.issubdtype(zeros.dtype, jnp.inexact) else zeros


def _with_dtype_of(old: Any, new: Any) -> Any:
    """Casts a new leaf of the inner state to the dtype of the old leaf."""
    # The unscaled gradients of bfloat16 parameters are float32. Without this cast, Adam's bfloat16
    # moments would become float32 in the first step, with twice the memory and a second
    # compilation.
    dtype = jnp.result_type(old)
    return new if jnp.result_type(new) == dtype else new.astype(dtype)
