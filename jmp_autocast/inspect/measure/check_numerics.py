"""`check_numerics`: which equation makes the first infinity or NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax

from ...arguments import Call, check_function, flatten, is_array, name_of
from ...interpreters.compat import (
    Tracer,
    body_of,
    consts_of,
    fresh_make_jaxpr,
    is_array_aval,
    jaxpr_as_fun,
    mark_frames,
    set_weak_type,
    trace_context,
)
from ...policies.registry import did_you_mean
from .evaluator import Walker
from .measured import Site, sites_in
from .numerics_probe import NumericsProbe, Reading
from .numerics_report import NumericsReport, bad_message
from .programs import Declared

mark_frames(__file__)

Mode = Literal["raise", "collect", "overflow"]


def check_numerics(fn: Callable[..., Any], *, mode: Mode = "raise") -> Callable[..., Any]:
    """Counts infinities, NaNs and what a float16 could not hold, equation by equation.

    The function runs as it is, with or without `autocast`; what is inside loops, branches, calls
    and checkpoints is counted as well. To check the backward pass, check the gradient:
    ``check_numerics(jax.grad(autocast(loss)))``. An infinity that the program writes down, as in a
    mask, is no fault; what is reported is the equation that makes a NaN from operands without one,
    or an infinity from finite operands.

    It runs compiled, also within ``jit``, and takes a multiple of the function's own time, in
    compilation above all: it is a tool to find a fault with, not to train with. It is traced and
    compiled once per signature, as ``jit`` does. The modes are those of Paddle's
    ``TensorCheckerConfig``.

    Args:
        fn: The function.
        mode: ``"raise"``: the first fault is an error. ``"collect"``: returns the result and a
            report of all equations. ``"overflow"``: as ``"collect"``, and a value beyond float16's
            range counts as a fault; for the float32 function, to see what float16 would do to it.

    Returns:
        A function of the same arguments: in mode ``"raise"`` of the same result, else of a pair of
        the result and a `NumericsReport`.

    Raises:
        TypeError: ``fn`` is not callable; or, at the call, it is differentiated from outside.
        ValueError: There is no such mode.
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
    check_function(fn, "check_numerics", "Pass the function itself; what comes back is called.")
    if mode not in get_args(Mode):
        modes = ", ".join(map(repr, get_args(Mode)))
        raise ValueError(
            f"mode must be one of {modes}, got {mode!r}.{did_you_mean(str(mode), get_args(Mode))}"
        )
    checked = _Checked(fn, mode)

    @functools.wraps(fn, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return checked(args, kwargs)

    return wrapper


class _Program(NamedTuple):
    """One signature's program, with its readings."""

    run: Callable[..., tuple[list[Any], Reading]]
    unflatten: Callable[[Sequence[Any]], Any]
    sites: tuple[Site, ...]
    closes_over_tracers: bool


class _Checked:
    def __init__(self, fn: Callable[..., Any], mode: Mode) -> None:
        self._fn = fn
        self._mode = mode
        self._name = name_of(fn)
        self._programs: dict[Any, _Program] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = flatten(self._fn, (), args, kwargs)
        program = self._program(call, args, kwargs)
        outputs, readings = program.run(*call.arrays)
        result = program.unflatten(outputs)
        report = NumericsReport(self._name, self._mode, program.sites, readings)
        if self._mode != "raise":
            return result, report
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(readings)):
            raise_later = functools.partial(_raise, self._name, program.sites)
            jax.debug.callback(raise_later, readings)
        elif report.first is not None:
            raise FloatingPointError(bad_message(self._name, report.first))
        return result

    def _program(self, call: Call, args: Any, kwargs: Any) -> _Program:
        leaves, tree = jax.tree.flatten((args, kwargs))
        static = tuple(_identity(x) for x in leaves if not is_array(x))
        types = tuple(jax.typeof(x) for x in call.arrays)
        key = (tree, static, types, jax.sharding.get_abstract_mesh(), trace_context())
        try:
            program = self._programs.get(key)
        except TypeError:  # an argument that is no array has no hash
            return self._trace(call)
        if program is None:
            program = self._trace(call)
            if not program.closes_over_tracers:
                self._programs[key] = program
        return program

    def _trace(self, call: Call) -> _Program:
        closed = fresh_make_jaxpr(call.traceable, *call.arrays)
        traced = any(isinstance(x, Tracer) for x in consts_of(closed))
        hoisted: Sequence[Any] = ()
        if traced:  # what is differentiated has to be an argument, to be noticed
            converted, hoisted = jax.closure_convert(jaxpr_as_fun(closed), *call.arrays)
            closed = fresh_make_jaxpr(converted, *call.arrays, *hoisted)
        walker = Walker(NumericsProbe(self._mode == "overflow", ranges=self._mode != "raise"))

        @jax.jit
        def run(*arrays: Any) -> tuple[list[Any], Reading]:
            walked = walker.start(closed, [Declared()], arrays)
            outputs = [value.arrays[0] for value in walked.outputs]
            declared = [v.aval for v in body_of(closed).outvars]
            return list(map(_as_weak_as, outputs, declared)), walked.readings

        function = _not_differentiable(run, self._name)
        return _Program(
            lambda *arrays: function(*arrays, *hoisted),
            call.unflatten,
            tuple(sites_in(closed)),
            traced,
        )


def _as_weak_as(x: Any, aval: Any) -> Any:
    """An equation that is bound again may lose a weak type."""
    differs = is_array_aval(aval) and jax.typeof(x).weak_type != aval.weak_type
    return set_weak_type(x, aval) if differs else x


def _identity(x: Any) -> Any:
    """0.0 and -0.0 are equal, as are 1 and True, and programs of them differ."""
    return type(x), repr(x) if isinstance(x, float | complex) else x


def _not_differentiable(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Custom derivative rules are gone from what is run, so nobody may differentiate it."""
    function = jax.custom_jvp(run)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        raise TypeError(
            f"check_numerics({name}) is differentiated, and it checks a program as it is, without "
            f"its derivative rules. Check the gradient: check_numerics(jax.grad({name}))."
        )

    function.defjvp(rule)
    return function


def _raise(name: str, sites: tuple[Site, ...], readings: Reading) -> None:
    first = NumericsReport(name, "raise", sites, readings).first
    if first is not None:
        raise FloatingPointError(bad_message(name, first))
