"""What all wrappers of functions share: their identity, and what Python sees of them."""

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
    """A function with options; a subclass says what a call does.

    Args:
        fn: The function.
        options: The checked options, with a hash; ``options.params`` as `arguments.check_params`
            returned it.
    """

    _by = "autocast"
    """The public function that makes it, for messages."""
    _fix = staticmethod(fix_of)
    """From something that is not callable to what to do about it."""

    def __init__(self, fn: Callable[..., Any], options: Any) -> None:
        arguments.check_function(fn, self._by, self._fix(fn))
        check_linen(fn)
        arguments.check_params_in_range(fn, options.params)
        self._wrap(fn, options)

    def _wrap(self, fn: Any, options: Any) -> None:
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
        return name if found is self else (wrapper_of, (self._fn, self._options, self._kind()))

    @classmethod
    def _kind(cls) -> type[Wrapper]:
        """Returns the kind of wrapper that this class is one of."""
        return cls

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
    if not inspect.isfunction(fn):
        is_tree = callable(fn) and not jax.tree_util.all_leaves([fn])
        return (pytrees_of(kind) if is_tree else kind)(fn, options)
    wrapper = kind(fn, options)
    # `functools.wraps` copies the `__dict__`: the wrappers in it then belong to another function.
    owner, wrappers = fn.__dict__.get(_WRAPPERS, (None, {}))
    if owner is not fn:
        _, wrappers = fn.__dict__[_WRAPPERS] = (fn, {})
    return wrappers.setdefault((kind, options), wrapper)


_WRAPPERS = "__jmp_autocast_wrappers__"


@functools.cache
def pytrees_of(kind: Any) -> Any:
    """Returns the class of wrappers of modules that are pytrees: a pytree as well.

    As part of another module, such a wrapper would hide its parameters from whoever takes them
    from a tree, and nothing would train them.

    Args:
        kind: The class of wrappers of functions.
    """

    class Tree(kind):
        @classmethod
        def _kind(cls) -> type[Wrapper]:
            return kind

    Tree.__name__, Tree.__qualname__ = kind.__name__, kind.__qualname__

    def unflatten(options: Any, children: Iterable[Any]) -> Any:
        # JAX also puts placeholders where the module was, which are not callable.
        wrapper = Tree.__new__(Tree)
        wrapper._wrap(*children, options)
        return wrapper

    path = jax.tree_util.GetAttrKey("__wrapped__")
    jax.tree_util.register_pytree_with_keys(
        Tree, lambda wrapper: (((path, wrapper._fn),), wrapper._options), unflatten
    )
    return Tree
