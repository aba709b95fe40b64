"""`check_numerics`: finds the equation with the first infinity or NaN."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np

from ...autocast import opened
from ...call.arguments import Call, check_function, flatten, is_array, name_of
from ...call.outputs import as_traced
from ...interpreters import compat
from ...policies.callables import has_hash
from ...policies.choices import check_choice
from ...policies.errors import with_usage
from ..signature import Signature, Traced, split
from .devices import is_on_one_device, on_device
from .evaluator import Evaluator
from .measured import as_real, is_measurable, measured_equations
from .numerics_probe import NumericsProbe
from .numerics_report import NumericsReport, bad_message, passed_message
from .programs import Program

compat.mark_frames(__file__)

Mode = Literal["raise", "collect", "overflow"]


P = ParamSpec("P")
R = TypeVar("R")


@overload
def check_numerics(fn: Callable[P, R], *, mode: Literal["raise"] = ...) -> Callable[P, R]: ...
@overload
def check_numerics(
    fn: Callable[P, R], *, mode: Literal["collect", "overflow"]
) -> Callable[P, tuple[R, NumericsReport]]: ...
@overload
def check_numerics(fn: Callable[P, Any], *, mode: Mode) -> Callable[P, Any]: ...
@with_usage("check_numerics(fn, mode=...)(*args)")
def check_numerics(fn: Callable[..., Any], *, mode: Mode = "raise") -> Callable[..., Any]:
    """Counts infinities, NaNs and values that float16 cannot hold, equation by equation.

    The function runs as it is, with or without `autocast`; equations inside loops, branches, calls
    and checkpoints count as well. To check the backward pass, check the gradient:
    ``check_numerics(jax.grad(autocast(loss)))``. A fault is a NaN from operands without a NaN, or
    an infinity from finite operands. An infinity that the program itself contains, as in a mask, is
    no fault. Mode ``"raise"`` also raises if a NaN of an argument reaches a result, or if an
    infinity of an argument reaches a scalar result, such as a loss.

    Outside of ``jit`` and on one device, the check runs equation by equation, and compiles each
    kind of equation once. Inside ``jit`` or on several devices it is compiled as a whole, which
    takes up to 32 times as long as compiling the function. It is traced once per signature, as with
    ``jit``. Use it to find a fault, not to train. The modes are those of Paddle's
    ``TensorCheckerConfig``.

    Args:
        fn: The function.
        mode: ``"raise"`` raises an error for the first fault. ``"collect"`` returns the result and
            a report of all equations. ``"overflow"`` is like ``"collect"``, but a value beyond
            float16's range is a fault, too: it finds the overflows of float16 in a function that
            runs in float32.

    Returns:
        A function of the same arguments. In mode ``"raise"`` it returns the result of ``fn``, else
        a pair of the result and a `NumericsReport`.

    Raises:
        TypeError: ``fn`` is not callable; or, at the call, the checked function is differentiated.
        ValueError: ``mode`` is unknown.
        FloatingPointError: At the call, in mode ``"raise"``. Within an outer ``jit`` the error is
            JAX's own, ``jax.errors.JaxRuntimeError``, with the same text.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import check_numerics
        >>> def entropy(p):
        ...     with jax.named_scope("head"):
        ...         return -jnp.sum(p * jnp.log(p))
        >>> check_numerics(entropy)(jnp.array([0.5, 0.5, 0.0]))
        Traceback (most recent call last):
        ...
        FloatingPointError: entropy: log makes 1 infinity among 3 values (float32[3]) in scope head
        ...
        >>> value, report = check_numerics(entropy, mode="collect")(jnp.array([0.5, 0.5]))
        >>> report.first is None
        True
    """
    check_function(fn, "check_numerics", "Pass the function itself, and call the result.")
    check_choice("mode", mode, get_args(Mode))
    # The `_Checked` object holds the traces of `fn`, and is freed with the returned function.
    checked = _Checked(fn, mode)
    # Returns a function, not the `_Checked` object, so that a class may use it as a method.
    return functools.wraps(fn, updated=())(lambda *args, **kwargs: checked(args, kwargs))


class _ClosesOverTracersError(Exception):
    """A trace uses tracers of an outer trace, so no other call may use the trace."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Declared:
    """A traced function. It is hashable by identity, so that it can be static in `jax.jit`.

    Args:
        closed: The jaxpr.
        unflatten: Converts the outputs of the jaxpr to the result of the function.
    """

    closed: compat.ClosedJaxpr
    unflatten: Callable[..., Any]


class _Checked:
    """A checked function: `jax.jit` holds its traces, one per signature."""

    def __init__(self, fn: Callable[..., Any], mode: Mode) -> None:
        self._fn = fn
        self._mode = mode
        self._name = name_of(fn)
        self._declared = jax.jit(self._declare, static_argnums=(0, 1))
        self._compiled = jax.jit(self._run, static_argnums=0)

    def __reduce__(self) -> Any:
        # The traces of `jax.jit` cannot be pickled, so another process traces the function again.
        return _Checked, (self._fn, self._mode)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with opened(self._fn, args, kwargs) as call:
            # JAX's cache finds the trace of an earlier call if `fn` is equal. If `opened` creates a
            # function, it equals the function that `opened` creates in the next call. The user's
            # own function may have no hash, so `fn` is None in its place.
            fn = None if call.fn is self._fn else call.fn
            traced = self._traced(fn, *split((call.args, call.kwargs)))
            (outputs, report), unflatten = traced.arrays, traced.static
            if self._mode == "raise":
                if any(isinstance(x, compat.Tracer) for x in jax.tree.leaves(report)):
                    # The counts are known only when the outer `jit` runs.
                    jax.debug.callback(_raise, report)
                else:
                    _raise(report, call.args, call.kwargs)
            result = call.finish(unflatten(outputs))
        return result if self._mode == "raise" else (result, report)

    def _traced(self, fn: Any, signature: Signature, arrays: list[Any]) -> Traced:
        if signature.is_constant and has_hash(fn):
            try:
                declared: _Declared = self._declared.trace(fn, signature, *arrays).out_info.static
            except _ClosesOverTracersError:
                pass
            else:
                # The gradient of a GPT of 12 layers takes 8 s of CPU time if each kind of equation
                # is compiled once, and 63 s if the program is compiled as a whole.
                if not _is_traced(arrays) and is_on_one_device(declared.closed, arrays):
                    return self._run(declared, *map(on_device, arrays))
                return self._compiled(declared, *self._undifferentiated(arrays))
        # This trace serves one call, and is not cached. Closed-over tracers become arguments, so
        # that the rule of `_undifferentiated` also sees a derivative with respect to them.
        call, closed = self._program(fn, signature, arrays)
        converted, hoisted = jax.closure_convert(compat.jaxpr_as_fun(closed), *arrays)
        closed = compat.fresh_make_jaxpr(converted, *arrays, *hoisted)
        run = jax.jit(functools.partial(self._run, _Declared(closed, call.unflatten)))
        return run(*self._undifferentiated([*arrays, *hoisted]))

    def _declare(self, fn: Any, signature: Signature, *arrays: Any) -> Traced:
        """Traces the function without running it; the cache of `jax.jit` keeps the trace."""
        call, closed = self._program(fn, signature, arrays)
        # A trace that closes over tracers must not be cached: JAX would reuse it in another outer
        # trace, in which these tracers are not valid.
        if any(isinstance(x, compat.Tracer) for x in compat.consts_of(closed)):
            raise _ClosesOverTracersError
        return Traced((), _Declared(closed, call.unflatten))

    def _program(self, fn: Any, signature: Signature, arrays: Sequence[Any]) -> tuple[Call, Any]:
        args, kwargs = signature.rebuilt(arrays)
        call = flatten(self._fn if fn is None else fn, (), args, kwargs)
        return call, compat.fresh_make_jaxpr(call.traceable, *arrays)

    def _run(self, declared: _Declared, *arrays: Any) -> Traced:
        # In mode "raise" only NaNs and infinities are counted, because its error message needs no
        # other counts, and XLA compiles these two in half the time of all counts.
        probe = NumericsProbe(self._mode == "overflow", ranges=self._mode != "raise")
        evaluated = Evaluator(probe).start(declared.closed, [Program()], arrays)
        pairs = zip(evaluated.outputs, compat.body_of(declared.closed).outvars, strict=True)
        # Binding each equation again may lose the weak type of an output: `as_traced` restores it.
        outputs = [as_traced(x, v.aval, "same") for (x,), v in pairs]
        equations = tuple(measured_equations(declared.closed))
        results = [x for (x,) in evaluated.outputs if is_measurable(jax.typeof(x))]
        passed = probe.passes_on(arrays, results)
        report = NumericsReport(self._name, self._mode, equations, evaluated.readings, passed)
        return Traced((outputs, report), declared.unflatten)

    def _undifferentiated(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns equal arrays that raise an error if they are differentiated.

        A derivative would be wrong: the check does not run custom derivative rules of the program.
        Refs are returned as they are: JAX does not allow them in a function with a derivative rule.
        """

        @jax.custom_jvp
        def same(*arrays: Any) -> Any:
            return arrays

        @same.defjvp
        def rule(*_: Any) -> Any:
            raise TypeError(
                f"check_numerics({self._name}) is differentiated, and it checks a program as it "
                "is, without its derivative rules. Check the gradient: "
                f"check_numerics(jax.grad({self._name}))."
            )

        others = iter(same(*(x for x in arrays if not compat.is_ref(jax.typeof(x)))))
        return [x if compat.is_ref(jax.typeof(x)) else next(others) for x in arrays]


def _is_traced(arrays: Sequence[Any]) -> bool:
    """Whether operations on arrays become part of an outer trace."""
    probe = jnp.zeros((), jnp.int32) + 1
    return any(isinstance(x, compat.Tracer) for x in (probe, *arrays))


def _raise(report: NumericsReport, args: Any = (), kwargs: Any = None) -> None:
    if (first := report.first) is not None:
        raise FloatingPointError(bad_message(report.name, first))
    if np.any(report.passed_on):
        leaves = jax.tree_util.tree_leaves_with_path((args, kwargs or {}))
        floats = [(p, x) for p, x in leaves if is_array(x) and is_measurable(jax.typeof(x))]
        bad = [
            jax.tree_util.keystr(path[1:], simple=True, separator="/")
            for path, x in floats
            if not np.isfinite(as_real(x)).all()
        ]
        raise FloatingPointError(passed_message(report.name, bad))
