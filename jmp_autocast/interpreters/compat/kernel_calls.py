"""Calls of kernels, and of functions with rules of their own, before JAX traces them.

In a jaxpr such a function is a program for the dtypes of its operands. It is a function of Python
until it is called: what is traced inside `calls_through` calls each of them through another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util


class Around(Protocol):
    """What calls go through: an immutable value, which is part of the key of JAX's caches."""

    @property
    def functions(self) -> Sequence[str]:
        """The dotted names of functions without rules that go through it, too."""
        ...

    def __call__(
        self,
        names: Sequence[str],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static: Sequence[int],
    ) -> Any:
        """Calls a function.

        Args:
            names: Its own name, and that with its module.
            call: From arguments, keyword arguments and a pair of dtypes, of which the first among
                its declared results becomes the second, or None, to its results.
            args: The arguments.
            kwargs: The keyword arguments.
            static: The positions of arguments that are no arrays.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Inside:
    """What a function calls that is called with other dtypes: as it is, whatever its name."""

    functions: tuple[str, ...] = ()

    def __call__(
        self, names: Any, call: Callable[..., Any], args: Any, kwargs: Any, static: Any
    ) -> Any:
        return call(args, kwargs, None)


INSIDE: Around = _Inside()
"""For what is part of a call that went through. It includes rules of functions, which JAX traces
when it differentiates: a kernel in one keeps what it declares in float32, such as its sums."""

# A function that was jitted and traced elsewhere did not go through: it is traced again.
_AROUND: Any = jax.make_user_context(None)


@contextlib.contextmanager
def calls_through(around: Around | None) -> Iterator[None]:
    """What is traced inside calls kernels through a function.

    The methods and functions of JAX that are replaced are the same for all threads, and do nothing
    else in threads, and in traces, that are not inside.

    Args:
        around: What they are called through; None for nothing.
    """
    if around is _AROUND.value:
        yield
        return
    places = [] if around is None else [*_places(), *_functions(around.functions)]
    _replace(places)
    try:
        with _AROUND(around):
            yield
    finally:
        _restore(places)


def calls_go_through() -> Around | None:
    """Returns what kernels are called through now."""
    return _AROUND.value


def current_scopes() -> tuple[str, ...]:
    """Returns the ``jax.named_scope`` names around what is traced now, in the innermost trace."""
    stack = source_info_util.current_name_stack().stack
    return tuple([s.name for s in stack if type(s).__name__ == "Scope"])


# --- what is replaced -------------------------------------------------------------------------

_Place = tuple[Any, str, Callable[[Any], Any]]
_lock = threading.Lock()
_replaced: dict[tuple[int, str], list[Any]] = {}  # place -> what stood there, number of users


def _replace(places: Sequence[_Place]) -> None:
    with _lock:
        for owner, name, replacement in places:
            key = id(owner), name
            if key not in _replaced:
                _replaced[key] = [vars(owner)[name], 0]
                setattr(owner, name, replacement(vars(owner)[name]))
            _replaced[key][1] += 1


def _restore(places: Sequence[_Place]) -> None:
    with _lock:
        for owner, name, _ in places:
            key = id(owner), name
            _replaced[key][1] -= 1
            if not _replaced[key][1]:
                setattr(owner, name, _replaced.pop(key)[0])


@functools.cache
def _places() -> tuple[_Place, ...]:
    """Returns the methods that call functions with rules, and the functions that make kernels."""
    classes = [jax.custom_vjp, jax.custom_jvp, jax.custom_batching.custom_vmap]
    partitioning = _module("jax.experimental.custom_partitioning")
    classes += [partitioning.custom_partitioning] if partitioning else []
    places: list[_Place] = [(cls, "__call__", _method) for cls in classes]
    for module, name, maker in (
        ("jax.experimental.pallas", "pallas_call", _pallas_call),
        ("jax.ffi", "ffi_call", _ffi_call),
        ("jax.lax", "composite", _composite),
    ):
        owner = _module(module)
        if owner is not None and name in vars(owner):
            places.append((owner, name, maker))
    return tuple(places)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _functions(names: Sequence[str]) -> list[_Place]:
    """Returns where the functions of these dotted names stand, as far as they are imported."""
    found: list[_Place] = []
    for dotted in names:
        module, _, name = dotted.rpartition(".")
        owner = sys.modules.get(module)
        if owner is not None and callable(vars(owner).get(name)):
            found.append((owner, name, functools.partial(_function, dotted)))
    return found


def names_of(function: Any) -> tuple[str, ...]:
    """Returns the name of a function, and that with its module.

    Example:
        >>> names_of(jax.nn.relu)[0]
        'relu'
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", "") or type(function).__name__
    module = getattr(function, "__module__", "") or ""
    return name, f"{module}.{getattr(function, '__qualname__', name)}"


# --- what stands in their place ---------------------------------------------------------------


# Arguments that say in which dtype a product is returned; it is added up in float32 in any case.
_RESULT_DTYPES = ("preferred_element_type", "out_dtype", "output_dtype")


def _returning(dtypes: Any, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a call with another dtype of the results, where they say one."""
    if not dtypes:
        return args, kwargs
    old, new = dtypes

    def changed(name: str, value: Any) -> Any:
        is_dtype = isinstance(value, (str, type, np.dtype, type(jnp.float32)))
        return new if name in _RESULT_DTYPES and is_dtype and jnp.dtype(value) == old else value

    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function of C
        names = []
    names += [""] * len(args)
    args = tuple(changed(name, value) for name, value in zip(names, args, strict=False))
    return args, {name: changed(name, value) for name, value in kwargs.items()}


def _function(dotted: str, original: Any) -> Any:
    def call(args: Any, kwargs: Any, dtypes: Any) -> Any:
        args, kwargs = _returning(dtypes, original, args, kwargs)
        return original(*args, **kwargs)

    @functools.wraps(original, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        around = _AROUND.value
        if around is None:
            return original(*args, **kwargs)
        return around((dotted,), call, args, kwargs, ())

    return function


def _method(original: Any) -> Any:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        around = _AROUND.value
        if around is None:
            return original(self, *args, **kwargs)

        def call(args: Any, kwargs: Any, dtypes: Any) -> Any:
            args, kwargs = _returning(dtypes, vars(self).get("fun", self), args, kwargs)
            function = _with_rules_inside(self) if _AROUND.value is INSIDE else self
            return original(function, *args, **kwargs)

        static = vars(self).get("nondiff_argnums") or vars(self).get("static_argnums") or ()
        static = (static,) if isinstance(static, int) else tuple(static)
        return around(names_of(vars(self).get("fun", self)), call, args, kwargs, static)

    return __call__


_RULES = ("fwd", "bwd", "jvp", "vmap_rule")


def _with_rules_inside(function: Any) -> Any:
    """Returns a function with rules that are traced as part of its call."""

    def inside(rule: Any) -> Any:
        @functools.wraps(rule, updated=())
        def traced(*args: Any, **kwargs: Any) -> Any:
            with calls_through(INSIDE):
                return rule(*args, **kwargs)

        return traced

    made = object.__new__(type(function))
    rules = {k: inside(v) for k, v in vars(function).items() if k in _RULES and callable(v)}
    vars(made).update(vars(function) | rules)
    return made


def _maker(original: Any, names: Callable[..., Sequence[str]], has_results: bool) -> Any:
    """Returns what stands for a function that makes a kernel of its first arguments."""

    @functools.wraps(original)
    def make(first: Any, *rest: Any, **options: Any) -> Any:
        around = _AROUND.value
        if around is None:
            return original(first, *rest, **options)
        known = names(first, *rest, **options)

        def call(args: Any, kwargs: Any, dtypes: Any) -> Any:
            given, named = rest, options
            if has_results and dtypes and rest:
                given = (_with_dtype(rest[0], *dtypes), *rest[1:])
            elif has_results and dtypes:
                found = {k: _with_dtype(v, *dtypes) for k, v in options.items() if k in _RESULTS}
                named = options | found
            return original(first, *given, **named)(*args, **kwargs)

        @functools.wraps(first if callable(first) else original, updated=())
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return around(known, call, args, kwargs, ())

        return kernel

    return make


_RESULTS = ("out_shape", "result_shape_dtypes")


def _with_dtype(results: Any, old: Any, new: Any) -> Any:
    """Returns declared results with another dtype in place of one."""

    def changed(result: Any) -> Any:
        is_old = getattr(result, "dtype", None) == old and hasattr(result, "shape")
        if not is_old:
            return result
        if hasattr(result, "update"):
            return result.update(dtype=new)
        return jax.ShapeDtypeStruct(result.shape, new)

    return jax.tree.map(changed, results, is_leaf=lambda x: hasattr(x, "dtype"))


def _pallas_call(original: Any) -> Any:
    def names(kernel: Any, *_: Any, name: str | None = None, **__: Any) -> Sequence[str]:
        return (*((name,) if name else ()), *names_of(kernel))

    return _maker(original, names, has_results=True)


def _ffi_call(original: Any) -> Any:
    return _maker(original, lambda target, *_, **__: (str(target),), has_results=True)


def _composite(original: Any) -> Any:
    def names(function: Any, *rest: Any, **options: Any) -> Sequence[str]:
        return (str(options.get("name", *rest[:1])), *names_of(function))

    return _maker(original, names, has_results=False)
