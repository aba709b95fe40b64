"""`autocast` for a part of a Flax Linen model: a module class or a method.

A whole model needs no adapter: ``jmp_autocast.autocast(model.apply)``. For a part of a model,
Linen's variables must pass through the transformation, as they do in ``nn.remat`` and ``nn.jit``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import flax.linen as nn

from ..autocast import Options, Part, autocast_options
from ..call.forms import Decorator, check_form, hide_mistakes
from ..call.outputs import OutputDtype
from ..policies import PolicyLike
from ..policies.errors import wrong_type
from .flax_compat import lifted, packed
from .results import cast_leaves, cast_outputs, dtypes_of, without_output_dtype

Target = TypeVar("Target", bound=Callable[..., Any])


@overload
def autocast(
    target: Target,
    policy: PolicyLike | None = ...,
    *,
    methods: Sequence[str] | None = ...,
    output_dtype: OutputDtype = ...,
    enabled: bool = ...,
) -> Target: ...
@overload
def autocast(
    target: None = ...,
    policy: PolicyLike | None = ...,
    *,
    methods: Sequence[str] | None = ...,
    output_dtype: OutputDtype = ...,
    enabled: bool = ...,
) -> Callable[[Target], Target]: ...
@hide_mistakes
def autocast(
    target: Any = None,
    policy: PolicyLike | None = None,
    *_misplaced: Any,
    methods: Sequence[str] | None = None,
    output_dtype: OutputDtype = "same",
    enabled: bool = True,
    **_unknown: Any,
) -> Any:
    """Runs a part of a Flax Linen model in mixed precision.

    This is a lifted transformation like ``nn.remat``: initialization, mutable collections, ``sow``
    and PRNG streams work inside the part, and it composes with ``nn.scan``, ``nn.remat``,
    ``nn.vmap`` and ``nn.jit``. A wrapped class keeps its name, so that the variables of a model
    keep their paths.

    For a whole model use ``jmp_autocast.autocast(model.apply)``.

    Args:
        target: A module class, a ``functools.partial`` of one, a method in the body of a class
            (outside ``nn.compact``'s decorator), or a function whose first argument is a module.
            None to use ``autocast`` as a decorator with options.
        policy: As in `jmp_autocast.autocast`.
        methods: The methods of a class that run in mixed precision, ``__call__`` by default.
        output_dtype: As in `jmp_autocast.autocast`; variables always keep their dtypes. With
            ``"computed"``, consumers outside the part get its 16-bit values.
        enabled: As in `jmp_autocast.autocast`.

    Returns:
        ``target`` in mixed precision; with ``target=None`` a decorator. All variables of the module
        count as parameters, which have no vote in the choice of dtypes.

    Raises:
        TypeError: ``target`` is a module instead of a class, or is not callable, or an option has
            the wrong type.
        ValueError: As `jmp_autocast.autocast`.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> from jmp_autocast.integrations import linen
        >>> class Net(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         x = linen.autocast(nn.Dense, jnp.bfloat16)(8)(x)
        ...         return nn.Dense(2)(x)  # float32
        >>> x = jnp.ones((1, 8))
        >>> variables = Net().init(jax.random.key(0), x)
        >>> sorted(variables["params"])
        ['Dense_0', 'Dense_1']
        >>> str(jax.make_jaxpr(Net().apply)(variables, x)).count("bf16[1,8] = dot_general")
        1
    """
    # A wrong option fails here, not at the first call of a model. ``params`` is 0, because the
    # variables are argument 0 of the transformed function.
    check_form(_misplaced, _unknown)
    checked = autocast_options(policy, 0, output_dtype, enabled)
    lift = Decorator(_lifted, methods=methods, options=checked)
    return lift if target is None else lift(target)


def _lifted(target: Any, options: Options, methods: Sequence[str] | None) -> Any:
    if isinstance(target, nn.Module) or not callable(target):
        raise wrong_type(
            "linen.autocast takes a module class, or a function whose first argument is a module",
            target,
            "Write autocast(nn.Dense)(8) instead of autocast(nn.Dense(8)), or "
            "jmp_autocast.autocast(model.apply) for a whole model.",
        )
    return lifted(_autocast, target, methods=methods, options=options)


def _autocast(fn: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """Runs a scope function of `flax.core.lift` in mixed precision."""

    def inner(
        scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        declared: list[Any] = []

        @functools.wraps(fn)
        def run(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            scope = scope_fn(variables, rngs)
            out = fn(scope, *args, **kwargs)
            changed = repack_fn(scope)
            declared[:] = dtypes_of(changed)
            return out, changed

        cast = Part(run, without_output_dtype(options))
        out, changed = cast(variables, rngs, *args, **kwargs)
        if not options.is_on:
            return out, changed
        # A variable keeps its dtype: float32 batch statistics stay float32.
        out = cast_outputs(out, options)
        return out, cast_leaves(changed, declared)

    return packed(inner, "autocast")
