"""The function transform `autocast`, and the steps of a call from arguments to outputs."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, overload

import jax

from .backend import Choice
from .call import arguments
from .call.forms import Decorator, NoContext, check_form, check_options, hide_mistakes
from .call.kernels import kernels_of, traced_with_kernels
from .call.options import Options, autocast_options
from .call.outputs import OutputDtype, as_traced, request_of
from .call.wrapping import Wrapper, wrapper_of
from .float8.dequantize import dequantized
from .float8.units import warn_without_units
from .interpreters import Planner, Rewriter
from .interpreters.after.computed_outputs import computed_requests
from .interpreters.after.kept_wide import warnings_of
from .interpreters.compat import (
    ClosedJaxpr,
    body_of,
    fresh_make_jaxpr,
    mark_frames,
)
from .interpreters.compat.kernel_calls import kernels_in
from .interpreters.compat.other_interpreters import register_with_imported
from .interpreters.compat.settings import (
    backends_are_set_up,
    default_precision,
    with_default_precision,
    without_default_precision,
)
from .interpreters.keep.choice import ResidualChoice
from .interpreters.keep.emit import may_plan, run_planned
from .interpreters.plan.data import EquationPlan, Plan, input_states
from .policies import Policy, PolicyLike
from .policies.dtypes import is_default
from .policies.precisions import precision_around
from .scopes import BECAUSE, GOVERNED, mark

mark_frames(__file__)

F = TypeVar("F", bound=Callable[..., Any])


@overload
def autocast(
    fn: F,
    policy: PolicyLike | None = ...,
    *,
    params: arguments.Params = ...,
    output_dtype: OutputDtype = ...,
    enabled: bool = ...,
) -> F: ...
@overload
def autocast(
    fn: None = ...,
    policy: PolicyLike | None = ...,
    *,
    params: arguments.Params = ...,
    output_dtype: OutputDtype = ...,
    enabled: bool = ...,
) -> Callable[[F], F]: ...
@hide_mistakes
def autocast(
    fn: Callable[..., Any] | None = None,
    policy: PolicyLike | None = None,
    *_misplaced: Any,
    params: arguments.Params = None,
    output_dtype: OutputDtype = "same",
    enabled: bool = True,
    **_unknown: Any,
) -> Any:
    """Runs a float32 function in mixed precision.

    Matmuls and convolutions run in the compute dtype; exponentials, logarithms, sums, norms and
    linear algebra run in float32. An elementwise operation between products runs in the widest
    dtype among the operands that vote (computed values always do, and most parameters do not); any
    other elementwise operation runs in float32. The result has the same signature and output types
    as ``fn``; gradients have the dtypes of the parameters and accumulate in float32. ``autocast``
    composes with ``jit``, ``grad``, ``vmap``, ``shard_map``, ``checkpoint`` and the other
    transformations, inside and outside the wrapped function, and with itself: an inner ``autocast``
    governs its region.

    Outside ``jit``, each call is traced, planned and compiled again. Under ``jit`` this happens
    once per signature, and a call costs nothing extra.

    Args:
        fn: The function, method or callable module. Arrays in its arguments are traced; all
            other leaves (bools, strings, numbers, callables) are static. None to use ``autocast``
            as a decorator with options.
        policy: A `Policy`; or a compute dtype, ``float16`` or ``bfloat16``; or a string such as
            ``"params=float32,compute=bfloat16,output=float32"``; or a ``jmp.Policy``. None for
            ``Policy()``, whose compute dtype depends on the default backend: float16 on GPUs whose
            tensor cores multiply float16 but not bfloat16 (V100, T4), else bfloat16. The choice is
            made when the program is traced.
        params: Which arguments hold parameters: a position or several, or a predicate of an array's
            path in the arguments (``"0/dense/kernel"``); ``()`` for none. None infers the arguments
            from the program, and never from a name: an argument holds parameters if it is a module
            (a callable pytree), or a container with an array that a product consumes as its weight.
            Most parameters do not affect the choice of dtypes: a bias or a scale does not widen the
            other operand.
        output_dtype: ``"same"`` for the dtypes that ``fn`` returns, ``"computed"`` for the dtypes
            that the rewritten program computes, or one dtype for all float32 and 16-bit outputs.
            With ``"computed"``, a result that PyTorch's autocast leaves in 16 bits (an ELU, a
            variance) is float32 inside the program, and rounded on return. Return logits for
            sampling in float32: ``jax.random.categorical`` draws its noise in the dtype of the
            logits, and in bfloat16 it draws only the first 1,300 of 50,000 tokens.
        enabled: False runs ``fn`` without any cast, even inside another ``autocast``. The
            environment variable ``JMP_AUTOCAST=0`` disables every wrapper in the same way.

    Returns:
        The function in mixed precision; with ``fn=None`` a decorator. Equal functions and options
        give equal wrappers, so a second ``jit(autocast(fn))`` does not trace again. If ``fn`` is a
        module that is a pytree, its wrapper is a pytree with the module as ``__wrapped__``, and a
        model may hold the wrapper.

    Raises:
        TypeError: ``fn`` is not callable, ``enabled`` is a traced value, or an option has the
            wrong type.
        ValueError: The compute dtype is neither float16 nor bfloat16, ``params`` is out of range,
            or another option has an invalid value.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import autocast
        >>> @autocast(policy=jnp.bfloat16)
        ... def loss(params, x):
        ...     return jnp.mean(jax.nn.relu(x @ params["w"]) ** 2)
        >>> params = {"w": jnp.ones((8, 8))}
        >>> jax.grad(loss)(params, jnp.ones((2, 8)))["w"].dtype
        dtype('float32')
        >>> "bf16[2,8] = dot_general" in str(jax.make_jaxpr(loss)(params, jnp.ones((2, 8))))
        True
    """
    check_form(_misplaced, _unknown)
    options = autocast_options(policy, params, output_dtype, enabled)
    if fn is None:
        return Decorator(wrapper_of, options=options, kind=Autocast)
    return wrapper_of(fn, options, Autocast)


class Autocast(Wrapper, NoContext):
    """A function in mixed precision: the result of `autocast`."""

    is_whole = True  # warn if a scope of the policy is not in the function
    inputs_are_leaves = True  # the plan's inputs are the array leaves of the arguments, in order
    _options: Options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function in mixed precision."""
        if not self._options.is_on:
            # The name of this scope keeps an outer `autocast` from casting inside it.
            args, kwargs = dequantized((args, kwargs))
            with jax.named_scope(mark(GOVERNED)), with_default_precision(), kernels_in(None):
                return self._fn(*args, **kwargs)
        return run_call(self, self._fn, self._options, args, kwargs)

    @property
    def policy(self) -> Policy:
        """The policy that the function runs under."""
        return self._options.chosen[0]

    def planned(self, *args: Any, **kwargs: Any) -> PlannedCall:
        """Traces and plans a call without running it.

        Args:
            *args: Positional arguments; a ``jax.ShapeDtypeStruct`` counts as an array.
            **kwargs: Keyword arguments.

        Raises:
            ValueError: The wrapper is not enabled, so that nothing is planned.
        """
        if not self._options.enabled:
            raise ValueError(
                f"{self!r} has enabled=False: it casts nothing, and there is no plan to look at. "
                "Wrap the function with enabled=True."
            )
        with self.opened(self._fn, self._options.params, args, kwargs) as call:
            options = self._options_of(call)
            planned = plan_call(call.fn, options, call.args, call.kwargs, abstract=True)
            return dataclasses.replace(planned, untrained=call.untrained)

    @staticmethod
    def takes(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether this class handles a call of ``fn``; the base class handles all."""
        return True

    @staticmethod
    def opened(
        fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[arguments.Opened]:
        """Returns a context manager that yields the call as a function of arrays and static values.

        Subclasses move the state of mutable objects into the arguments.
        """
        return nullcontext(arguments.Opened(fn, args, kwargs, params))

    def _options_of(self, call: arguments.Opened) -> Options:
        """Returns the wrapper's options, in which ``call.params`` replaces ``params``."""
        return dataclasses.replace(self._options, params=call.params)

    def keeping(self, residuals: ResidualChoice) -> Any:
        """Returns a wrapper of this function that also plans its residuals, as `keep_less` does."""
        options = dataclasses.replace(self._options, residuals=residuals)
        return wrapper_of(self._fn, options, self._kind())

    def __repr__(self) -> str:
        policy = self._options.policy
        dtype = str(policy.compute_dtype)
        # A `repr` does not set up a backend.
        if is_default(dtype) and backends_are_set_up():
            policy, choice = self._options.chosen
            dtype = f"{policy.compute_dtype} ({choice and choice.reason})"
        return f"autocast({self._fn!r}, {dtype})"


class Part(Autocast):
    """A function in mixed precision, whose policy may name scopes that are in other functions."""

    is_whole = False


# The wrapper classes for calls with mutable objects, such as NNX modules. An integration adds its
# class when it is imported.
STATEFUL_KINDS: list[type[Autocast]] = []


def kind_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Autocast]:
    """Returns the first class in `STATEFUL_KINDS` that takes a call, or `Autocast`."""
    return next((kind for kind in STATEFUL_KINDS if kind.takes(fn, args, kwargs)), Autocast)


def opened(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[arguments.Opened]:
    """Returns the context manager that `opened` of the wrapper class for this call returns."""
    return kind_of(fn, args, kwargs).opened(fn, (), args, kwargs)


def wrapper_for(
    by: str, fn: Any, policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Autocast:
    """Returns the wrapper of a function that a tool plans; a wrapper is returned unchanged.

    Args:
        by: The public function of the tool, for messages.
        fn: The function, or a wrapper of `autocast`.
        policy: The policy; None for the policy of the wrapper, or the default.
        args: The positional arguments of the call, which decide the class of the wrapper.
        kwargs: The keyword arguments.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: ``fn`` is a wrapper, and ``policy`` is given as well.
    """
    arguments.check_function(fn, by, "Pass the function itself, then its arguments.")
    check_options(by, fn, kwargs)
    if not isinstance(fn, Autocast):
        return wrapper_of(fn, autocast_options(policy), kind_of(fn, args, kwargs))
    if policy is not None:
        raise ValueError(
            f"{by} got policy= for a function that autocast has already wrapped with its own. "
            "Leave policy out, or pass the function that was wrapped."
        )
    return fn


ANNOTATED: Any = jax.make_user_context(False)
"""While this is True, each emitted equation carries the reason of its plan on the name stack.

The value is part of the keys of JAX's caches, so a program that was traced with these reasons is
never reused for a run without them.
"""


def _reason(plan: EquationPlan) -> str:
    return mark(f"{BECAUSE}{plan.reason.code.value} {plan.reason.cause}")


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """One call, traced and planned.

    Args:
        call: The flattened arguments.
        traced: The jaxpr of the function.
        closed: The jaxpr that is planned: ``traced``, prepared by the planner.
        planner: The planner, which also plans derivative rules that JAX traces later.
        plan: The plan of the jaxpr.
        residuals: How much is kept for the backward pass, and where.
        choice: The chosen default compute dtype; None if the policy names one.
        untrained: As in `arguments.Opened`.
    """

    call: arguments.Call
    traced: Any
    closed: ClosedJaxpr
    planner: Planner
    plan: Plan
    residuals: ResidualChoice
    choice: Choice | None = None
    untrained: Callable[[str], bool] = lambda path: False

    def rewritten(self, *arrays: Any, planned: Callable[[Plan], None] | None = None) -> list[Any]:
        """Runs the planned program by binding its equations in the ambient trace.

        Args:
            *arrays: The array arguments of the call.
            planned: A callback for the plan of each derivative or batching rule of the user. JAX
                traces such a rule when it differentiates or maps.
        """
        declared = functools.partial(self.declared, planned=planned)
        # If no residuals are planned, the program is not traced a second time.
        if not may_plan(self.closed, self.residuals):
            return declared(*arrays)
        closed, is_param = fresh_make_jaxpr(declared, *arrays), self.call.is_param
        return run_planned(closed, is_param, self.residuals, arrays)

    def declared(self, *arrays: Any, planned: Callable[[Plan], None] | None = None) -> list[Any]:
        """Runs the planned program like `rewritten`, without planning its residuals."""
        # JAX traces the user's derivative rules while the program runs. A rule may call a kernel
        # that `in_compute_dtype` decorates, and this kernel needs the policy.
        kernels = kernels_of(self.planner.policy) if self.planner.has_rules else nullcontext()
        with jax.named_scope(mark(GOVERNED)), kernels:
            label = _reason if ANNOTATED.value else None
            rewriter = Rewriter(self.planner, planned, label)
            return rewriter.program(self.plan, self.closed, arrays)


def plan_call(
    fn: Callable[..., Any], options: Options, args: Any, kwargs: Any, abstract: bool = False
) -> PlannedCall:
    """Traces and plans one call.

    Args:
        fn: The function.
        options: The options of its wrapper.
        args: Positional arguments, any pytrees.
        kwargs: Keyword arguments, any pytrees.
        abstract: Whether a ``jax.ShapeDtypeStruct`` counts as an array.
    """
    policy, choice = options.chosen
    call = arguments.flatten(fn, options.params, args, kwargs, abstract)
    # JAX's cache is not used: arrays that the function closes over may change between calls.
    around = precision_around(default_precision())
    with without_default_precision() if around else nullcontext():
        trace = functools.partial(fresh_make_jaxpr, call.traceable, *call.arrays)
        traced = traced_with_kernels(policy, trace)
    call.look_at(traced)
    planner = Planner(policy, default_precision=around)
    closed = planner.prepare(traced)
    body = body_of(closed)
    warn_without_units(policy)
    inputs = input_states(body.invars, call.sources, policy)
    requests = [request_of(v.aval, options.output_dtype) for v in body.outvars]
    if options.output_dtype == "computed":
        # The outputs are requested in the dtypes that PyTorch returns. All other values keep the
        # dtypes that are best for their consumers.
        requests = computed_requests(planner, closed, inputs, requests)
    plan = planner.plan_program(closed, inputs, requests)
    return PlannedCall(call, traced, closed, planner, plan, options.residuals, choice)


def run_call(
    wrapper: Autocast, fn: Callable[..., Any], options: Options, args: Any, kwargs: Any
) -> Any:
    """Runs one call: trace -> plan -> rewrite -> run, in the ambient trace.

    Args:
        wrapper: The wrapper.
        fn: The function to run: the wrapper's function, or ``fn`` of an `arguments.Opened`.
        options: The options of the call.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    register_with_imported()
    planned = plan_call(fn, options, args, kwargs)
    if wrapper.is_whole:
        arguments.report_unmatched(planned.planner, fn)
    call, closed = planned.call, planned.closed
    dtype = planned.planner.policy.compute_dtype
    for message in warnings_of(planned.plan, arguments.name_of(fn), dtype):
        warnings.warn(message, stacklevel=3)
    outputs = planned.rewritten(*call.arrays)
    avals = [v.aval for v in body_of(closed).outvars]
    outputs = [
        as_traced(x, aval, options.output_dtype) for x, aval in zip(outputs, avals, strict=True)
    ]
    return call.unflatten(outputs)
