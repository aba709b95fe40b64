"""Named scopes for the modules of Flax NNX, which opens none itself."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from .flax_compat import give_path, methods_of, objects_in, patched, path_of, take_path

_local = threading.local()

# A part of the key of JAX's caches: a jitted function that was traced without scopes is traced
# again with them.
_NAMED: Any = jax.make_user_context(False)


@contextlib.contextmanager
def module_scopes(nodes: list[Any]) -> Iterator[list[Any]]:
    """Opens scopes in each call of a module in ``nodes``: its attribute path, class and method.

    ``__call__`` adds no scope. Inside the context the methods of the classes are replaced, as in
    ``nnx.tabulate``. Calls in other threads open no scopes.

    Args:
        nodes: Copies of the caller's NNX objects, made for this trace.

    Yields:
        A list of ``nodes``. Append the objects that the call returns: at the end, the paths of all
        modules in the list are removed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
        >>> with module_scopes([model]):
        ...     text = jax.make_jaxpr(lambda x: model(x))(jnp.ones(2)).pretty_print(name_stack=True)
        >>> "Sequential/layers/0/Linear" in text
        True
    """
    owner = object()
    modules = list(_modules(nodes))
    # A module that has a path is inside an outer `autocast`, and keeps this path.
    for path, module in modules:
        if path_of(module) is None:
            give_path(module, path, owner)
    methods = {method for cls in {type(m) for _, m in modules} for method in methods_of(cls)}
    # All threads share the replaced methods, but only a thread with a stack of paths opens scopes.
    outer = getattr(_local, "stack", None)
    _local.stack = [] if outer is None else outer
    roots = list(nodes)
    try:
        with patched(methods, _in_scope), _NAMED(True):
            yield roots
    finally:
        _local.stack = outer
    for _, module in _modules(roots):
        take_path(module, owner)


def _modules(roots: list[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for path, node in objects_in(roots):
        if isinstance(node, nnx.Module):
            yield path, node


def _in_scope(name: str, original: Any) -> Any:
    """Returns the method ``original`` with the scopes of its module around it."""

    @functools.wraps(original, updated=())
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = original.__get__(self, type(self)) if hasattr(original, "__get__") else original
        stack = getattr(_local, "stack", None)
        # If a module calls its own method, or `super()`, its scopes are already open.
        if stack is None or (stack and stack[-1][0] is self):
            return call(*args, **kwargs)
        names, keys = _names(self, stack[-1][1] if stack else ())
        names += [] if name == "__call__" else [name]
        stack.append((self, keys))
        try:
            with contextlib.ExitStack() as scopes:
                for scope in names:
                    scopes.enter_context(jax.named_scope(scope))
                return call(*args, **kwargs)
        finally:
            stack.pop()

    return method


def _names(module: Any, caller: tuple[Any, ...]) -> tuple[list[str], tuple[Any, ...]]:
    """Returns the scopes that a call of a module opens, and the module's path for inner calls."""
    own = path_of(module)
    keys = caller if own is None else own  # a module made in the trace has no path
    # If the calling module does not hold this module, the scopes show the path from the root
    # object, without the root's position in the arguments.
    inside = bool(caller) and keys[: len(caller)] == caller
    attributes = keys[len(caller) :] if inside else keys[1:]
    return [*map(str, attributes), type(module).__name__], keys
