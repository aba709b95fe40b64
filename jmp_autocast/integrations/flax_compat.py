"""The only file that uses undocumented names of Flax.

The docstring of each function has the reason. Supported: Flax 0.12.7, the first release that
requires JAX 0.10, to the newest one; `tests/project/test_public_names.py` finds other uses.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from flax import nnx
from flax.core import lift
from flax.linen import transforms
from flax.typing import HashableMapping

Path = tuple[Any, ...]

# All parts of one call share it: NNX finds its objects again by the tag.
_TAG = "jmp_autocast"


# --- NNX: objects to state and back -----------------------------------------------------------


def update_context() -> AbstractContextManager[Any]:
    """Returns the context of one call, in which objects keep their identity.

    `nnx.update_context` is documented; `split` and `merge` below, which need it, are not.
    """
    return nnx.update_context(_TAG)


def split_nodes(nodes: Any) -> tuple[Any, list[tuple[Path, Any]]]:
    """Returns the graph of NNX objects, and their state as pairs (path, variable or array).

    `nnx.jit` splits its arguments by `nnx.split_context`. The documented `nnx.split` forgets the
    identity of objects: a returned module would be a new one.
    """
    with nnx.split_context(_TAG) as context:
        graphdef, state = context.split(nodes)
    return graphdef, list(nnx.to_flat_state(state))


def merge_nodes(graphdef: Any, state: Sequence[tuple[Path, Any]], inner: bool) -> Any:
    """Returns the objects of a graph with a state in them.

    Args:
        graphdef: The graph of `split_nodes`.
        state: Pairs (path, variable or array).
        inner: For the traced function: the objects are copies. Otherwise the original objects are
            changed and returned.
    """
    with nnx.merge_context(_TAG, inner=inner) as context:
        return context.merge(graphdef, nnx.from_flat_state(state))


def is_unchanged(after: Any, before: Any) -> bool:
    """Returns whether the graph after a call equals the graph before it.

    `with_same_outer_index` gives the graph before the call the object indices of a merged one.
    """
    return same_structure(after, before.with_same_outer_index())


def same_structure(one: Any, other: Any) -> bool:
    """Returns whether two graphs have equal nodes and attributes.

    The dataclasses of a graph compare static values with `==` from Python 3.13 on, which has no
    truth value for arrays; in the tuples here an object equals itself, as in Python 3.12.

    Example:
        >>> from flax import nnx
        >>> same_structure(nnx.graphdef(nnx.Dropout(0.5)), nnx.graphdef(nnx.Dropout(0.1)))
        False
    """
    return _comparable(one) == _comparable(other)


def _comparable(graphdef: Any) -> tuple[Any, ...]:
    attributes = [
        (name, type(attribute), getattr(attribute, "value", None))
        for name, attribute in graphdef.attributes
    ]
    return graphdef.nodes, attributes, graphdef.num_leaves


def static_values(graphdef: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the name and the value of each static attribute in a graph.

    An attribute that is no static one has no ``value``.
    """
    for name, attribute in graphdef.attributes:
        if hasattr(attribute, "value"):
            yield name, attribute.value


def objects_in(roots: Any) -> Iterator[tuple[Path, Any]]:
    """Yields the path of each node in some roots, and the node.

    `nnx.iter_graph` is documented without ``graph``: by default it may walk a tree, and yield a
    shared object twice.
    """
    yield from nnx.iter_graph(roots, graph=True)


# --- NNX: reading and writing -----------------------------------------------------------------


def raw_value(leaf: Any) -> Any:
    """Returns the value of a variable, and any other leaf of a state unchanged.

    ``variable[...]`` would run the variable's ``on_get_value`` hooks.
    """
    is_variable = isinstance(leaf, nnx.Variable) and not is_hijax(leaf)
    return leaf.get_raw_value() if is_variable else leaf


def metadata(leaf: Any) -> Any:
    """Returns the type of a variable and its metadata: sharding names, hooks, a user's own."""
    return (type(leaf), leaf.get_metadata()) if isinstance(leaf, nnx.Variable) else None


def is_hijax(x: Any) -> bool:
    """True for a hijax variable, also for its tracer.

    Its ``__class__`` is a variable and its type is not: to JAX it is a value, with a type of its
    own, and its reads and writes are equations of the program.
    """
    return isinstance(x, nnx.Variable) and not issubclass(type(x), nnx.Variable)


def with_metadata(value: Any, data: Any) -> Any:
    """Returns the entry of a variable in a state: its value, or a variable for a mapping.

    `nnx.from_flat_state` would take a mapping, as `nnx.capture` puts one into each module, for more
    of the state.

    Args:
        value: The value of the variable.
        data: The `metadata` of the variable.
    """
    if data is None or not isinstance(value, Mapping):
        return value
    kind, attributes = data
    return kind.from_metadata(value, attributes)


def write_again(variable: Any) -> None:
    """Writes the value of a variable into it: Flax raises if it is of another trace."""
    variable.set_raw_value(variable.get_raw_value())


def assign(node: Any, name: str, value: Any) -> None:
    """Assigns an attribute of an object, past the ``__setattr__`` of a user's class.

    Flax raises if the object is of another trace.
    """
    nnx.Pytree.__setattr__(node, name, value)


# --- NNX: paths of modules ----------------------------------------------------------------------

_NODES = "_pytree__nodes"


class _WithPath(HashableMapping[Any, Any]):
    """The static attribute of NNX objects with the names of their attributes of arrays, and a path.

    A static attribute survives the transformations of NNX; a map from identities would not. Every
    object has this one. It equals the plain one, so that a module with a path has the same tree
    structure as any other: a module that a function closes over, or a prefix of axes made outside.
    Two layers with different paths can still share the trace of a jitted method.
    """

    def __init__(self, nodes: Mapping[Any, Any], path: Path, owner: object) -> None:
        super().__init__(nodes)
        self.path = path
        self.owner = owner

    def update(self, other: Mapping[Any, Any]) -> _WithPath:
        """Returns the updated mapping; Flax calls it when a module gets a new attribute."""
        return _WithPath({**self, **other}, self.path, self.owner)


def give_path(module: Any, path: Path, owner: object) -> None:
    """Stores a path in a module; the ``__setattr__`` of a user's class is bypassed.

    Args:
        module: A traced copy of the caller's module.
        path: The keys on the way to it.
        owner: The call that removes the path later.
    """
    vars(module)[_NODES] = _WithPath(vars(module)[_NODES], path, owner)


def path_of(module: Any) -> Path | None:
    """Returns the path that a module, or the original of a copy, was given; None for no path."""
    nodes = vars(module)[_NODES]
    return nodes.path if isinstance(nodes, _WithPath) else None


def take_path(module: Any, owner: object) -> None:
    """Removes the path of a module, if ``owner`` gave it."""
    nodes = vars(module)[_NODES]
    if isinstance(nodes, _WithPath) and nodes.owner is owner:
        vars(module)[_NODES] = HashableMapping(nodes)


# --- NNX: calls of modules --------------------------------------------------------------------

Method = tuple[type, str]
"""A method, by the class that defines it and its name."""

_lock = threading.Lock()
_patched: dict[Method, list[Any]] = {}  # method -> its own function, number of users
_FLAX = frozenset(nnx.Module.__mro__)


def methods_of(cls: type) -> list[Method]:
    """Returns the methods of ``cls`` that compute: ``__call__``, and those without underscores.

    The methods of every module (``eval``, ``sow``) compute nothing.

    Example:
        >>> from flax import nnx
        >>> [name for _, name in methods_of(nnx.Embed)]
        ['__call__', 'attend']
    """
    found: dict[str, type] = {}
    for c in cls.__mro__:
        for name, value in vars(c).items() if c not in _FLAX else ():
            has_name = not name.startswith("__") and isinstance(value, types.FunctionType)
            if has_name or name == "__call__":
                found.setdefault(name, c)
    return [(c, name) for name, c in found.items()]


@contextlib.contextmanager
def patched(methods: Collection[Method], around: Callable[[str, Any], Any]) -> Iterator[None]:
    """Replaces methods of classes inside the context.

    NNX has no hook around the call of a module; `nnx.tabulate` does the same. Threads share the
    classes, so that the last user of a method restores it.

    Args:
        methods: The methods.
        around: From the name of a method and its function to the new function.
    """
    with _lock:
        for cls, name in methods:
            if (cls, name) not in _patched:
                _patched[cls, name] = [vars(cls)[name], 0]
                setattr(cls, name, around(name, vars(cls)[name]))
            _patched[cls, name][1] += 1
    try:
        yield
    finally:
        with _lock:
            for cls, name in methods:
                _patched[cls, name][1] -= 1
                if not _patched[cls, name][1]:
                    setattr(cls, name, _patched.pop((cls, name))[0])


# --- Linen ------------------------------------------------------------------------------------


def lifted(transform: Callable[..., Any], target: Any, **options: Any) -> Any:
    """Returns a Linen class or function under a transformation of functions of scopes.

    Flax makes `nn.remat` and `nn.jit` by `lift_transform` from their counterparts in
    `flax.core.lift`; the documented `nn.transforms` has no way to add another one.
    """
    made: Any = transforms.lift_transform(transform, target, **options)
    pairs = [(made, target)]
    if isinstance(target, functools.partial):
        pairs.append((made.func, target.func))
    for new, old in pairs:
        if isinstance(new, type):  # Flax renames the class, and with it the variables
            new.__name__, new.__qualname__ = old.__name__, old.__qualname__
            new.__module__, new.__doc__ = old.__module__, old.__doc__
    return made


def packed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function of scopes from a function of their variables and random keys.

    `lift.pack` is the building block of all lifted transformations. Here all collections and all
    keys are inputs, and all collections are outputs.

    Args:
        function: From (scope function, repacking function, variables, keys, *args, **kwargs) to
            the output and the changed variables.
        name: The name of the transformation in Flax's errors.
    """
    return lift.pack(function, (True,), (True,), (True,), name=name, enable_kwargs=True)
