"""`autocast` for Flax NNX, which updates the state of modules and opens scopes for them.

`scaled_value_and_grad` and `train_step` are for training in float16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from flax import nnx

from ..autocast import STATEFUL_KINDS, Autocast, Options, autocast_options, run_call
from ..call.arguments import Opened, Params
from ..call.forms import Decorator, check_form, hide_mistakes
from ..call.outputs import OutputDtype
from ..call.wrapping import pytrees_of, wrapper_of
from ..policies import PolicyLike
from .nnx_state import holds_objects, opened
from .nnx_training import scaled_value_and_grad, train_step
from .results import cast_leaves, cast_outputs, without_output_dtype

__all__ = ["autocast", "scaled_value_and_grad", "train_step"]


@hide_mistakes
def autocast(
    fn: Callable[..., Any] | None = None,
    policy: PolicyLike | None = None,
    *_misplaced: Any,
    params: Params = None,
    output_dtype: OutputDtype = "same",
    enabled: bool = True,
    **_unknown: Any,
) -> Any:
    """Runs a float32 function of Flax NNX modules in mixed precision.

    This is `jmp_autocast.autocast` for functions that take NNX modules (or any other NNX object:
    `Rngs`, `Optimizer`, metrics, variables) anywhere in the arguments, and for modules and their
    methods. A call updates the caller's objects, as with `nnx.jit`: batch statistics, RNG counters,
    caches, new variables and submodules, static attributes. State always keeps its dtype. The
    wrapper works inside and outside the transformations of JAX and NNX. The function can read, but
    not change, a module that it only closes over, or an argument that belongs to an outer trace.

    NNX puts no scopes around its modules. This `autocast` opens scopes around each call of a
    module, for its attribute path relative to the calling module and for its class: in a ``Net``
    with blocks in ``self.layers`` the scopes of a norm are ``Net/layers/0/Block/norm/LayerNorm``. A
    rule of a policy matches the norm by attribute (``"*/layers/0"``, ``"*/norm"``) and by class
    (``"*/LayerNorm"``). If a method is called from outside its module, its name is one more scope:
    a tied head is in ``Net/embed/Embed/attend``. Profiles show the same names.

    Args:
        fn: The function, module or bound method; None to use ``autocast`` as a decorator with
            options.
        policy: As in `jmp_autocast.autocast`.
        params: As in `jmp_autocast.autocast`; the path of a variable goes through the attributes of
            its module (``"0/layers/0/norm/scale"``). None: every ``nnx.Param``, and the containers
            that `jmp_autocast.autocast` infers. State that belongs to ``fn`` (a module, a method or
            a ``functools.partial``) always counts as parameters.
        output_dtype: As in `jmp_autocast.autocast`.
        enabled: As in `jmp_autocast.autocast`.

    Returns:
        The function in mixed precision; with ``fn=None`` a decorator. Equal functions and options
        give equal wrappers.

    Raises:
        TypeError: As `jmp_autocast.autocast`. When called: ``fn`` changes a module that it closes
            over, or leaves a traced array in a static attribute.
        ValueError: As `jmp_autocast.autocast`.
        flax.errors.TraceContextError: When called: ``fn`` changes an object of an outer trace, or
            adds, removes or returns objects while one of its arguments is of an outer trace. The
            caller's objects stay unchanged.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from jmp_autocast import BF16
        >>> from jmp_autocast.integrations.nnx import autocast
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.dense = nnx.Linear(8, 8, rngs=rngs)
        ...         self.norm = nnx.BatchNorm(8, rngs=rngs)
        ...
        ...     def __call__(self, x):
        ...         return self.norm(self.dense(x))
        >>> policy = BF16.with_rules({"*": "float32"}, scope="*/norm")
        >>> @autocast(policy=policy)
        ... def loss(net, x):
        ...     return jnp.mean(net(x) ** 2)
        >>> net = Net(nnx.Rngs(0))
        >>> grads = nnx.grad(loss)(net, jax.random.normal(jax.random.key(0), (8, 8)))
        >>> grads.dense.kernel.dtype, bool((net.norm.mean[...] != 0).any())
        (dtype('float32'), True)
    """
    check_form(_misplaced, _unknown)
    options = autocast_options(policy, params, output_dtype, enabled)
    wrap = Decorator(wrapper_of, options=options, kind=NNXAutocast)
    return wrap if fn is None else wrap(fn)


class NNXAutocast(Autocast):
    """A function of NNX modules in mixed precision: the result of `autocast`."""

    inputs_are_leaves = False  # the inputs are variables, in the order of their paths

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function in mixed precision."""
        # Without casts the function runs as it is, and changes the modules in place.
        if not self._options.is_on:
            return super().__call__(*args, **kwargs)
        with self.opened(self._fn, self._options.params, args, kwargs) as call:
            options = self._options_of(call)
            out, changed, after = run_call(self, call.fn, options, call.args, call.kwargs)
            # With "computed", the results keep the computed dtypes, but state must keep its
            # declared dtypes.
            if options.output_dtype == "computed":
                changed = cast_leaves(changed, after.dtypes)
            out = cast_outputs(out, self._options)
            return call.finish((out, changed, after))

    # The tools of `inspect` also call the next two methods.
    @staticmethod
    def takes(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether the function or an argument of a call holds NNX objects."""
        return holds_objects(fn, args, kwargs)

    @staticmethod
    def opened(
        fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Opened]:
        """Yields the call with the state of its objects as arguments; ``finish`` writes it back."""
        return opened(fn, params, args, kwargs)

    def _options_of(self, call: Opened) -> Options:
        return without_output_dtype(super()._options_of(call))

    def __repr__(self) -> str:
        return f"nnx.{super().__repr__()}"


STATEFUL_KINDS.append(NNXAutocast)

# With this registration, a model may hold a wrapped layer as an attribute without `nnx.data`.
nnx.register_data_type(pytrees_of(NNXAutocast))
