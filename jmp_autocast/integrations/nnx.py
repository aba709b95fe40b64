"""`autocast` for Flax NNX: modules keep the state that a call changes, and name their scopes.

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
    methods. The changes of a call are in the caller's objects afterwards, as with `nnx.jit`: batch
    statistics, RNG counters, caches, new variables and submodules, static attributes. State always
    keeps its dtype. It works inside and outside the transformations of JAX and NNX. The function
    can read, but not change, a module that it only closes over, or an argument that belongs to an
    outer trace.

    NNX puts no names into a program. Here each call of a module puts its attribute path, relative
    to the calling module, and then its class on the name stack: in a ``Net`` with blocks in
    ``self.layers`` the scopes of a norm are ``Net/layers/0/Block/norm/LayerNorm``, and
    a rule of a policy finds it by attribute (``"*/layers/0"``, ``"*/norm"``) and by class
    (``"*/LayerNorm"``). A method that is called from outside of its module adds its name: a tied
    head is in ``Net/embed/Embed/attend``. Profiles show the same names.

    Args:
        fn: The function, module or bound method; None to use ``autocast`` as a decorator with
            options.
        policy: As in `jmp_autocast.autocast`.
        params: As in `jmp_autocast.autocast`; the path of a variable is that of its module with
            the attributes appended (``"0/layers/0/norm/scale"``). None: every ``nnx.Param``, and
            the containers that are parameters in `jmp_autocast.autocast`. State that ``fn`` itself
            brings (as a module, a method or a ``functools.partial``) always counts as parameters.
        output_dtype: As in `jmp_autocast.autocast`.
        enabled: As in `jmp_autocast.autocast`.

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

    inputs_are_leaves = False  # they are variables, by their paths

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function in mixed precision."""
        # Without casts there is nothing to rewrite, and the modules change in place.
        if not self._options.is_on:
            return super().__call__(*args, **kwargs)
        with self.opened(self._fn, self._options.params, args, kwargs) as call:
            options = self._options_of(call)
            out, changed, after = run_call(self, call.fn, options, call.args, call.kwargs)
            # Outputs may stay as computed, but state must keep its declared dtypes.
            if options.output_dtype == "computed":
                changed = cast_leaves(changed, after.dtypes)
            out = cast_outputs(out, self._options)
            return call.finish((out, changed, after))

    # The tools of `inspect` run calls with these two methods, and leave the NNX objects unchanged.
    @staticmethod
    def takes(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True for a call with NNX objects among its arguments, or in its function."""
        return holds_objects(fn, args, kwargs)

    @staticmethod
    def opened(
        fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Opened]:
        """Takes the state out of the objects of a call; ``finish`` puts it back."""
        return opened(fn, params, args, kwargs)

    def _options_of(self, call: Opened) -> Options:
        return without_output_dtype(super()._options_of(call))

    def __repr__(self) -> str:
        return f"nnx.{super().__repr__()}"


STATEFUL_KINDS.append(NNXAutocast)

# A model may hold a wrapped layer without `nnx.data`, as it holds a layer.
nnx.register_data_type(pytrees_of(NNXAutocast))
