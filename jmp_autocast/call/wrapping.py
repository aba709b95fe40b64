"""The base class of wrappers: equality, signature, pickling and binding as a method."""

from __future__ import annotations

import abc
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from ..interpreters.compat import mark_frames
from ..policies.callables import has_hash
from . import arguments
from .forms import check_linen, fix_of

mark_frames(__file__)

W = TypeVar("W", bound="Wrapper")


class Wrapper(abc.ABC):
    """A function with options.

    Args:
        fn: The function.
        options: The checked options, which are hashable; ``options.params`` is a result of
            `arguments.check_params`.
    """

    _by = "autocast"
    """The public function that makes the wrapper, for messages."""
    _fix = staticmethod(fix_of)
    """A function that returns the fix to suggest for a value that is not callable."""

    def __init__(self, fn: Callable[..., Any], options: Any) -> None:
        arguments.check_function(fn, self._by, self._fix(fn))
        check_linen(fn)
        arguments.check_params_in_range(fn, options.params)
        self._wrap(fn, options)

    def _wrap(self, fn: Any, options: Any) -> None:
        # The `__dict__` of the function is not copied, because it holds the function's wrappers.
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._options = options

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with the options."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds the wrapper as a method."""
        return self if instance is None else types.MethodType(self, instance)

    def _key(self) -> tuple[Any, ...]:
        # A module of arrays is not hashable, and its arrays cannot be compared in a trace. So its
        # wrappers are equal if they wrap the same object.
        fn = self._fn if has_hash(self._fn) else id(self._fn)
        # The wrapper of an integration and the plain wrapper of one function are not equal.
        return type(self), fn, self._options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapper) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> Any:
        # A decorated function is pickled by its name, as functions are. Pickle by value would fail,
        # because the inner function's name leads to the wrapper. In `__main__`, which is another
        # module in the process that loads the pickle, cloudpickle pickles functions by value.
        name = getattr(self, "__qualname__", None)
        found: Any = sys.modules.get(self.__module__)
        if name is not None and self.__module__ != "__main__":
            for attribute in name.split("."):
                found = getattr(found, attribute, None)
        return name if found is self else (wrapper_of, (self._fn, self._options, self._kind()))

    @classmethod
    def _kind(cls) -> type[Wrapper]:
        """Returns the class to make the wrapper with: for a pytree subclass, its base class."""
        return cls

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._fn)


def wrapper_of(fn: Callable[..., Any], options: Any, kind: type[W]) -> W:
    """Returns the wrapper of a function, one for each wrapper class and options.

    The wrapper is kept in the ``__dict__`` of the function. JAX caches traces by the traced object,
    so that a new wrapper in each iteration of a loop would be traced again.
    """
    if not inspect.isfunction(fn):
        is_tree = callable(fn) and not jax.tree_util.all_leaves([fn])
        return (pytrees_of(kind) if is_tree else kind)(fn, options)
    wrapper = kind(fn, options)
    # `functools.wraps` copies the `__dict__`, so the wrappers in it may belong to another function.
    owner, wrappers = fn.__dict__.get(_WRAPPERS, (None, {}))
    if owner is not fn:
        _, wrappers = fn.__dict__[_WRAPPERS] = (fn, {})
    return wrappers.setdefault((kind, options), wrapper)


_WRAPPERS = "__jmp_autocast_wrappers__"


@functools.cache
def pytrees_of(kind: Any) -> Any:
    """Returns a subclass of a wrapper class that is a pytree, for modules that are pytrees.

    As a part of another module, a wrapper that is no pytree would hide its parameters from
    optimizers.
    """

    class Tree(kind):
        @classmethod
        def _kind(cls) -> type[Wrapper]:
            return kind

    Tree.__name__, Tree.__qualname__ = kind.__name__, kind.__qualname__

    def unflatten(options: Any, children: Iterable[Any]) -> Any:
        # The child may be a placeholder of JAX, which is not callable, so it is not checked.
        wrapper = Tree.__new__(Tree)
        wrapper._wrap(*children, options)
        return wrapper

    path = jax.tree_util.GetAttrKey("__wrapped__")
    jax.tree_util.register_pytree_with_keys(
        Tree, lambda wrapper: (((path, wrapper._fn),), wrapper._options), unflatten
    )
    return Tree
