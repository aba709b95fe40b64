"""`autocast` for Flax NNX: modules keep the state that a call changes, and name their scopes.

`scaled_value_and_grad` and `train_step` are for training in float16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

from ..arguments import name_of
from ..call_forms import Decorator, check_form
from ..outputs import per_output
from ..transform import Autocast, GivenOptions, autocast_options, wrapper_of
from .flax_compat import update_context
from .nnx_state import Call
from .nnx_training import scaled_value_and_grad, train_step
from .outputs import cast_leaves, without_output_dtype

__all__ = ["autocast", "scaled_value_and_grad", "train_step"]


def autocast(
    fn: Callable[..., Any] | None = None, *_misplaced: Any, **options: Unpack[GivenOptions]
) -> Any:
    """Runs a float32 function of Flax NNX modules in mixed precision.

    `jmp_autocast.autocast` for functions that take NNX modules (or any other NNX object: `Rngs`,
    `Optimizer`, metrics, variables), wherever they are in the arguments, or that are a module or a
    method of one. What the call changes is in the caller's objects afterwards, as with `nnx.jit`:
    batch statistics, RNG counters, caches, new variables and submodules, static attributes. State
    keeps its dtype whatever ``output_dtype`` says. Works inside and outside of the transformations
    of JAX and NNX. A module that the function only closes over can be read, not changed, and so
    can an argument that belongs to an outer trace.

    NNX leaves no names in a program. Here each call of a module puts its attribute path, relative
    to the calling module, and then its class on the name stack: in a ``Net`` with blocks in
    ``self.layers`` the scopes of a norm are ``Net/layers/0/Block/norm/LayerNorm``, and
    ``policy.with_scopes`` finds it by attribute (``"*/layers/0"``, ``"*/norm"``) and by class
    (``"*/LayerNorm"``). Profiles show the same names.

    Args:
        fn: The function, module or bound method; None to use ``autocast`` as a decorator with
            options.
        compute_dtype: As in `jmp_autocast.autocast`.
        policy: As in `jmp_autocast.autocast`.
        params: As in `jmp_autocast.autocast`; the path of a variable is that of its module with
            the attributes appended (``"0/layers/0/norm/scale"``). Default: every ``nnx.Param``,
            and the containers that are parameters in `jmp_autocast.autocast`. State that ``fn``
            itself brings (as a module, a method or a ``functools.partial``) always counts as
            parameters.
        output_dtype: As in `jmp_autocast.autocast`.
        enabled: As in `jmp_autocast.autocast`.
        on_unknown: As in `jmp_autocast.autocast`.

    Returns:
        The function in mixed precision; with ``fn=None`` a decorator. Equal functions and options
        give equal wrappers.

    Raises:
        TypeError: As `jmp_autocast.autocast`; when called, also if ``fn`` changes a module that it
            closes over, or leaves a traced array in a static attribute.
        ValueError: As `jmp_autocast.autocast`.
        flax.errors.TraceContextError: When called, if ``fn`` changes an object of an outer trace,
            or adds, removes or returns objects while one of its arguments is of an outer trace.
            No object is changed then.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from jmp_autocast import BF16
        >>> from jmp_autocast.integrations.nnx import autocast
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.dense = nnx.Linear(4, 4, rngs=rngs)
        ...         self.norm = nnx.BatchNorm(4, rngs=rngs)
        ...
        ...     def __call__(self, x):
        ...         return self.norm(self.dense(x))
        >>> policy = BF16.with_scopes({"*/norm": "float32"})
        >>> @autocast(policy=policy)
        ... def loss(net, x):
        ...     return jnp.mean(net(x) ** 2)
        >>> net = Net(nnx.Rngs(0))
        >>> grads = nnx.grad(loss)(net, jax.random.normal(jax.random.key(0), (8, 4)))
        >>> grads.dense.kernel.dtype, bool((net.norm.mean[...] != 0).any())
        (dtype('float32'), True)
    """
    check_form(_misplaced, options)
    wrap = Decorator(wrapper_of, options=autocast_options(**options), kind=NNXAutocast)
    return wrap if fn is None else wrap(fn)


class NNXAutocast(Autocast):
    """A function of NNX modules in mixed precision: what `autocast` returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function in mixed precision."""
        # Without casts there is nothing to rewrite, so that modules may change as they always do.
        if not self._options.enabled:
            return super().__call__(*args, **kwargs)
        with update_context():
            call, fast = self._opened(args, kwargs)
            out, changed = fast(call.values, call.rest)
            # State must keep its dtype: where outputs need not, both are cast out here.
            if fast._options.output_dtype == "computed":
                changed = cast_leaves(changed, call.dtypes)
            wanted = per_output(self._options.output_dtype, call.arranged, len(out))
            return call.finish(cast_leaves(out, wanted), changed)

    def planned(self, *args: Any, **kwargs: Any) -> Any:
        """Traces and plans a call without running it, for `jmp_autocast.explain`.

        The modules among the arguments stay as they are.

        Raises:
            ValueError: The wrapper is not enabled, so that nothing is planned.
        """
        if not self._options.enabled:
            return super().planned(*args, **kwargs)  # says so
        with update_context():
            call, fast = self._opened(args, kwargs)
            return fast.planned(call.values, call.rest)

    def _opened(self, args: Any, kwargs: Any) -> tuple[Call, Autocast]:
        """Returns a call with its state taken out, and the function of that state."""
        call = Call(self._fn, self._options.params, args, kwargs)

        # A function and not the bound method, which takes no other name: messages and profiles
        # shall show that of the user's function.
        def pure(state: Any, rest: Any) -> Any:
            return call.pure(state, rest)

        pure.__name__ = name_of(self._fn)
        options = without_output_dtype(self._options)
        return call, Autocast(pure, dataclasses.replace(options, params=call.is_param))

    def __repr__(self) -> str:
        return f"nnx.{super().__repr__()}"
