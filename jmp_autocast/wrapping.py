"""What all wrappers of functions share: their identity, and what Python sees of them."""

from __future__ import annotations

import abc
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

from . import arguments
from .call_forms import LINE
from .interpreters.compat import mark_frames
from .policies.callables import has_hash

mark_frames(__file__)

W = TypeVar("W", bound="Wrapper")


class Wrapper(abc.ABC):
    """A function with options; a subclass says what a call does.

    Args:
        fn: The function.
        options: The checked options, with a hash; ``options.params`` as `arguments.check_params`
            returned it.
    """

    _by = "autocast"
    """The public function that makes it, for messages."""
    _fix = f"Pass options by keyword: {LINE}, or @autocast(compute_dtype=...) above it."
    """What to do about something that is not callable."""

    def __init__(self, fn: Callable[..., Any], options: Any) -> None:
        arguments.check_function(fn, self._by, self._fix)
        arguments.check_params_in_range(fn, options.params)
        # Without the function's `__dict__`, in which its wrappers are: it would hold itself.
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._options = options

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, as the subclass says."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds the wrapper as a method."""
        return self if instance is None else types.MethodType(self, instance)

    def _key(self) -> tuple[Any, ...]:
        # A module of arrays has no hash, and compares its arrays: under a trace nobody knows
        # whether they are equal. The wrapper of one is equal to the wrapper of the same object.
        fn = self._fn if has_hash(self._fn) else id(self._fn)
        # The wrapper of an integration is another one than the plain wrapper of the function.
        return type(self), fn, self._options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapper) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> Any:
        # A decorated function goes by its name, as functions do: the wrapper took that name, so
        # that pickle would not accept it for the function inside. `__main__` is another module in
        # the process that reads the pickle; what is defined there goes by value, which cloudpickle
        # can do.
        name = getattr(self, "__qualname__", None)
        found: Any = sys.modules.get(self.__module__)
        if name is not None and self.__module__ != "__main__":
            for attribute in name.split("."):
                found = getattr(found, attribute, None)
        return name if found is self else (wrapper_of, (self._fn, self._options, type(self)))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._fn)


def wrapper_of(fn: Callable[..., Any], options: Any, kind: type[W]) -> W:
    """Returns the one wrapper of a function with these options.

    It lives with the function, in its ``__dict__``: JAX keeps traces as long as the function
    object that was traced, and a wrapper made anew in a loop would die each time.

    Args:
        fn: The function.
        options: The options.
        kind: The class of the wrapper.
    """
    wrapper = kind(fn, options)
    if not inspect.isfunction(fn):
        return wrapper
    # `functools.wraps` copies the `__dict__`: the wrappers in it then belong to another function.
    owner, wrappers = fn.__dict__.get(_WRAPPERS, (None, {}))
    if owner is not fn:
        _, wrappers = fn.__dict__[_WRAPPERS] = (fn, {})
    return wrappers.setdefault((kind, options), wrapper)


_WRAPPERS = "__jmp_autocast_wrappers__"
