"""`autocast`: a function transform, from arguments to outputs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import jax
from jax.typing import DTypeLike

from .backend import Choice
from .call import arguments, repeats
from .call.forms import Decorator, NoContext, check_form
from .call.kernels import kernels_of, traced_with_kernels
from .call.nesting import naming_the_nesting
from .call.options import OnUnknown, Options, autocast_options
from .call.outputs import as_traced, per_output, want_of
from .call.wrapping import Wrapper, wrapper_of
from .float8.dequantize import dequantized
from .float8.units import warn_without_units
from .interpreters import Planner, Rewriter
from .interpreters.after.computed_outputs import computed_wants
from .interpreters.after.kept_wide import guarded_products, wide_kernels
from .interpreters.compat import (
    ClosedJaxpr,
    body_of,
    fresh_make_jaxpr,
    is_computed_now,
    mark_frames,
)
from .interpreters.compat.kernel_calls import kernels_in
from .interpreters.compat.other_interpreters import register_with_imported
from .interpreters.compat.settings import (
    backends_are_set_up,
    default_precision,
    jit_is_disabled,
    with_default_precision,
    without_default_precision,
)
from .interpreters.keep.choice import ResidualChoice, Residuals
from .interpreters.plan.data import EquationPlan, Plan
from .interpreters.plan.value_facts import input_states
from .keep_less import may_plan, run_planned
from .policies import Policy, PolicyLike
from .policies.precisions import precision_around
from .scopes import BECAUSE, GOVERNED, mark

mark_frames(__file__)

F = TypeVar("F", bound=Callable[..., Any])


class PartOptions(TypedDict, total=False):
    """The options of `autocast` for a part of a model, whose parameters are known."""

    compute_dtype: DTypeLike | Literal["auto"] | None
    policy: PolicyLike | None
    output_dtype: Any
    enabled: bool
    on_unknown: OnUnknown
    residuals: Residuals
    keep_scopes: Sequence[str]
    compiler_options: Mapping[str, Any] | None


class GivenOptions(PartOptions, total=False):
    """The options of `autocast`, which says what each of them means."""

    params: arguments.Params


@overload
def autocast(fn: F, **options: Unpack[GivenOptions]) -> F: ...
@overload
def autocast(fn: None = ..., **options: Unpack[GivenOptions]) -> Callable[[F], F]: ...
def autocast(
    fn: Callable[..., Any] | None = None,
    *_misplaced: Any,
    compute_dtype: DTypeLike | Literal["auto"] | None = None,
    policy: PolicyLike | None = None,
    params: arguments.Params = arguments.AUTO,
    output_dtype: Any = "same",
    enabled: bool = True,
    on_unknown: OnUnknown = "keep",
    residuals: Residuals = "declared",
    keep_scopes: Sequence[str] = (),
    compiler_options: Mapping[str, Any] | None = None,
    **_unknown: Any,
) -> Any:
    """Runs a float32 function in mixed precision.

    Matmuls and convolutions run in the compute dtype; exponentials, logarithms, sums, norms and
    linear algebra run in float32; everything else runs in the widest dtype among its operands. The
    result has the same signature and output types as ``fn``; gradients have the dtypes of the
    parameters and accumulate in float32. ``autocast`` composes with ``jit``, ``grad``, ``vmap``,
    ``shard_map``, ``checkpoint`` and the other transformations, from inside and from outside, and
    with itself: an inner ``autocast`` governs its region.

    Outside ``jit`` it traces, plans and compiles at each call, and warns once where repeats of a
    call take more than 0.1 s. Under ``jit`` it does so once per signature, and costs nothing per
    call.

    Args:
        fn: The function, method or callable module. Arrays in its arguments are traced; all
            other leaves (bools, strings, numbers, callables) are static. None to use ``autocast``
            as a decorator with options.
        compute_dtype: ``float16`` or ``bfloat16``; None for the policy's, without one that of the
            default backend: float16 on GPUs with tensor cores for it alone (V100, T4), bfloat16 on
            all others. It is asked when the program is traced.
            ``"auto"`` is the dtype for which the default backend has matrix units, whatever the
            policy says. Without such units, as on most CPUs, nothing is lowered.
        policy: A `Policy`, a string such as ``"params=float32,compute=bfloat16,output=float32"``,
            or a ``jmp.Policy``.
        params: Which arguments hold parameters: a position or several, or a predicate of an array's
            path in the arguments (``"0/dense/kernel"``). Default: the containers of arrays that
            look like parameters because a product reads their matrices as weights, by name
            (``params``, ``model``, ``state_dict``), by the names in them (``kernel``, ``bias``) or
            because they are modules; otherwise argument 0, if it is a container and does not look
            like data. Most parameters do not affect the choice of
            dtypes: a bias or a scale does not widen what it is added to or multiplied with.
        output_dtype: ``"same"`` for the dtypes that ``fn`` returns, ``"computed"`` for the dtypes
            that the program computed in, or the dtype of all float32 and 16-bit outputs. A pytree
            of ``"same"`` and dtypes, a prefix of what ``fn`` returns, names one for each part:
            ``("same", jnp.bfloat16)`` for logits and a cache. With ``"computed"``, a result that
            PyTorch's autocast leaves in 16 bits (an ELU, a variance) is float32 inside the program,
            and rounded on return.
        enabled: False runs ``fn`` without any cast, even inside another ``autocast``. The
            environment variable ``JMP_AUTOCAST=0`` does so for every wrapper.
        on_unknown: What happens if the program contains a primitive without a rule (its operands
            keep their declared dtypes): ``"keep"``, ``"warn"`` or ``"error"``.
        residuals: What is kept for the backward pass, as for `keep_less`. ``"declared"`` leaves it
            as it is. ``"auto"`` computes cheap values in loop bodies again, where measurements show
            that this pays, and ``"recompute"`` everywhere. A share from 0 to 1 keeps at most that
            share. It has no effect if ``enabled`` is False.
        keep_scopes: Patterns of scopes in which nothing is computed again.
        compiler_options: Those that the program is compiled with, where they are what
            `jmp_autocast.compiler_options` returned: no trace can see what ``jax.jit`` is told.

    Returns:
        The function in mixed precision; with ``fn=None`` a decorator. Equal functions and options
        give equal wrappers, so a second ``jit(autocast(fn))`` does not trace again. The wrapper of
        a module that is a pytree is a pytree, with the module as ``__wrapped__``, so that a model
        may hold it.

    Raises:
        TypeError: ``fn`` is not callable, ``enabled`` is a traced value, or an option has the
            wrong type.
        ValueError: ``compute_dtype`` is another dtype, ``params`` is out of range, or another
            option has an invalid value.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import autocast
        >>> @autocast(compute_dtype=jnp.bfloat16)
        ... def loss(params, x):
        ...     return jnp.mean(jax.nn.relu(x @ params["w"]) ** 2)
        >>> params = {"w": jnp.ones((8, 8))}
        >>> jax.grad(loss)(params, jnp.ones((2, 8)))["w"].dtype
        dtype('float32')
        >>> "bf16[2,8] = dot_general" in str(jax.make_jaxpr(loss)(params, jnp.ones((2, 8))))
        True
    """
    check_form(_misplaced, _unknown)
    options = autocast_options(
        compute_dtype,
        policy,
        params,
        output_dtype,
        enabled,
        on_unknown,
        residuals,
        keep_scopes,
        compiler_options,
    )
    if fn is None:
        return Decorator(wrapper_of, options=options, kind=Autocast)
    return wrapper_of(fn, options, Autocast)


# What users write; the two parameters that only collect mistakes are no help to them.
vars(autocast)["__signature__"] = (_signature := inspect.signature(autocast)).replace(
    parameters=[p for p in _signature.parameters.values() if not p.name.startswith("_")]
)


class Autocast(Wrapper, NoContext):
    """A function in mixed precision: what `autocast` returns."""

    is_whole = True  # the scopes that its policy names are in it, or misspelled
    inputs_are_leaves = True  # the inputs of a plan are the arrays of the arguments, in their order
    _options: Options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function in mixed precision."""
        if not self._options.is_on:
            # The mark tells an autocast around this one that the region is dealt with: nothing is
            # cast.
            args, kwargs = dequantized((args, kwargs))
            with jax.named_scope(mark(GOVERNED)), with_default_precision(), kernels_in(None):
                return self._fn(*args, **kwargs)
        return run_call(self, self._fn, self._options, args, kwargs)

    @property
    def policy(self) -> Policy:
        """The policy that the function runs under."""
        return self._options.chosen[0]

    @property
    def is_enabled(self) -> bool:
        """Whether it plans and casts: False with ``enabled=False``."""
        return self._options.enabled

    def planned(self, *args: Any, **kwargs: Any) -> PlannedCall:
        """Traces and plans a call without running it.

        Args:
            *args: Positional arguments; a ``jax.ShapeDtypeStruct`` stands for an array.
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
        """True for a call that this kind of wrapper is made for; this one takes every call."""
        return True

    @staticmethod
    def opened(
        fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[arguments.Opened]:
        """Returns the context of a call, in which it is a function of arrays and the rest.

        Pytrees are that already: modules of Equinox, variables of Linen, dicts of arrays.
        """
        return nullcontext(arguments.Opened(fn, args, kwargs, params))

    def _options_of(self, call: arguments.Opened) -> Options:
        """Returns the options for an opened call."""
        return dataclasses.replace(self._options, params=call.params)

    def __repr__(self) -> str:
        options = self._options
        dtype: Any = "auto" if options.auto else options.policy.compute_dtype
        # A device that was not asked for yet is not asked for a text.
        if not options.auto and options.asks and backends_are_set_up():
            policy, choice = options.chosen
            dtype = f"{policy.compute_dtype} ({choice and choice.reason})"
        return f"autocast({self._fn!r}, compute_dtype={dtype})"


class Part(Autocast):
    """A function in mixed precision, whose policy may name scopes that are in other functions."""

    is_whole = False


# The kinds of wrappers whose objects hold state: each integration adds its own when it is imported.
STATEFUL_KINDS: list[type[Autocast]] = []


def kind_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Autocast]:
    """Returns the kind of wrapper that a call needs.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    return next((kind for kind in STATEFUL_KINDS if kind.takes(fn, args, kwargs)), Autocast)


def opened(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[arguments.Opened]:
    """Returns the context of a call of any function, in which it is one of arrays and the rest.

    Args:
        fn: The function, with or without `autocast`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    return kind_of(fn, args, kwargs).opened(fn, (), args, kwargs)


ANNOTATED: Any = jax.make_user_context(False)
"""While it is True, each emitted equation carries the reason of its plan on the name stack.

A user context is part of the key of JAX's caches: programs that run never have these names.
"""


def _reason(plan: EquationPlan) -> str:
    return mark(f"{BECAUSE}{plan.reason.code.value} {plan.reason.cause}")


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """One call, traced and planned.

    Args:
        call: The flattened arguments.
        traced: The jaxpr of the function.
        closed: The same, prepared for planning.
        planner: Plans the derivative rules that come into being later.
        plan: The plan of the jaxpr.
        residuals: How much is kept for the backward pass, and where.
        wanted: ``"same"``, ``"computed"`` or a dtype for each output.
        choice: What the backend chose, None where nobody asked it.
        untrained: As for `arguments.Opened`.
        onednn: As for `Options`.
    """

    call: arguments.Call
    traced: Any
    closed: ClosedJaxpr
    planner: Planner
    plan: Plan
    residuals: ResidualChoice
    wanted: list[Any]
    choice: Choice | None = None
    untrained: Callable[[str], bool] = lambda path: False
    onednn: bool = False

    def rewritten(self, *arrays: Any, planned: Callable[[Plan], None] | None = None) -> list[Any]:
        """Runs the planned program: its equations are bound in the ambient trace.

        Args:
            *arrays: The array arguments of the call.
            planned: Is called with the plan of each derivative or batching rule of the user's own,
                which comes into being, and is planned, when JAX differentiates or maps.
        """
        declared = functools.partial(self.declared, planned=planned)
        # Without a loop there is nothing to plan, and the program is not traced once more for it.
        if not may_plan(self.closed, self.residuals):
            return declared(*arrays)
        return run_planned(fresh_make_jaxpr(declared, *arrays), self.call, self.residuals, arrays)

    def declared(self, *arrays: Any, planned: Callable[[Plan], None] | None = None) -> list[Any]:
        """Runs the planned program as `rewritten`, and keeps what it keeps by itself.

        Args:
            *arrays: As for `rewritten`.
            planned: As for `rewritten`.
        """
        lowers = not (self.choice and self.choice.dtype is None)
        # A derivative rule that is made here is traced later, and calls kernels as well.
        kernels = (
            kernels_of(self.planner.policy, lowers) if self.planner.has_rules else nullcontext()
        )
        with jax.named_scope(mark(GOVERNED)), kernels:
            label = _reason if ANNOTATED.value else None
            rewriter = Rewriter(self.planner, planned, label, self.onednn)
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
        abstract: A ``jax.ShapeDtypeStruct`` stands for an array.
    """
    policy, choice = options.chosen
    call = arguments.flatten(fn, options.params, args, kwargs, abstract)
    # Not from JAX's cache: the function may close over arrays that have changed since.
    around = precision_around(default_precision())
    lowers_nothing = f"auto: {choice.reason}" if choice and choice.dtype is None else ""
    with without_default_precision() if around else nullcontext():
        trace = functools.partial(fresh_make_jaxpr, call.traceable, *call.arrays)
        traced = traced_with_kernels(policy, not lowers_nothing, trace)
    call.look_at(traced)
    planner = Planner(policy, lowers_nothing=lowers_nothing, default_precision=around)
    with naming_the_nesting(traced, fn):
        closed = planner.prepare(traced)
        body = body_of(closed)
        warn_without_units(policy)
        inputs = input_states(body.invars, call.sources, policy)
        wanted = per_output(options.output_dtype, call.unflatten, len(body.outvars))
        pairs = zip(body.outvars, wanted, strict=True)
        wants = [want_of(v.aval, dtype) for v, dtype in pairs]
        plan = planner.plan_program(closed, inputs, wants)
        if options.output_dtype == "computed":
            # Its readers inside keep the dtypes that serve them.
            plan = planner.plan_program(closed, inputs, computed_wants(planner, plan, wants))
    return PlannedCall(
        call,
        traced,
        closed,
        planner,
        plan,
        options.residuals,
        wanted,
        choice,
        onednn=options.onednn,
    )


def run_call(
    wrapper: Autocast, fn: Callable[..., Any], options: Options, args: Any, kwargs: Any
) -> Any:
    """One call: trace -> plan -> rewrite -> run, in the ambient trace.

    Args:
        wrapper: What is called.
        fn: Its function, or what that became when the call was opened.
        options: The options for it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    start = repeats.clock()
    register_with_imported()
    planned = plan_call(fn, options, args, kwargs)
    if wrapper.is_whole:
        arguments.report_unmatched(planned.planner, fn)
    call, closed = planned.call, planned.closed
    # Nobody pays for a look at derivative rules unless it was asked for: where somebody looks, the
    # rewriter goes into calls with a rule of their own even if nothing in them changes.
    report = None
    if options.on_unknown != "keep":
        report = functools.partial(
            arguments.report_unknown, planned.planner, on_unknown=options.on_unknown, fn=fn
        )
        report(planned.plan)
    if kept := guarded_products(planned.plan):
        message = kept.message(arguments.name_of(fn), planned.planner.policy.compute_dtype)
        warnings.warn(message, stacklevel=3)
    if wide := wide_kernels(planned.plan):
        message = wide.message(arguments.name_of(fn), planned.planner.policy.compute_dtype)
        warnings.warn(message, stacklevel=3)
    with naming_the_nesting(planned.traced, fn):
        outputs = planned.rewritten(*call.arrays, planned=report)
    avals = [v.aval for v in body_of(closed).outvars]
    outputs = list(map(as_traced, outputs, avals, planned.wanted))
    if not jit_is_disabled() and all(map(is_computed_now, outputs)):
        counts: repeats.Repeats = vars(wrapper).setdefault("_repeats", repeats.Repeats())
        seconds, own = repeats.clock() - start, vars(wrapper)["__wrapped__"]
        if message := counts.warning(call.shapes, seconds, arguments.name_of(own), own):
            warnings.warn(message, stacklevel=3)
    return call.unflatten(outputs)
