"""All uses of undocumented names of Flax.

The docstring of each function has the reason to use an undocumented name. Flax is supported from
0.12.7, the first release that requires JAX 0.10, to the newest release.
`tests/project/test_public_names.py` finds uses in other files.
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

# NNX recognizes the objects of one call by this tag, which all functions below share.
_TAG = "jmp_autocast"


# --- NNX: objects to state and back -----------------------------------------------------------


def update_context() -> AbstractContextManager[Any]:
    """Returns the context of one call, inside which NNX objects keep their identity.

    `nnx.update_context` is documented, but `nnx.split_context` and `nnx.merge_context`, which need
    it, are not.
    """
    return nnx.update_context(_TAG)


def split_nodes(nodes: Any) -> tuple[Any, list[tuple[Path, Any]]]:
    """Splits NNX objects into their graph and their state, as pairs (path, variable or array).

    `nnx.jit` uses `nnx.split_context` as well. The documented `nnx.split` loses the identity of
    objects: a returned module would be a new one.
    """
    with nnx.split_context(_TAG) as context:
        graphdef, state = context.split(nodes)
    return graphdef, list(nnx.to_flat_state(state))


def merge_nodes(graphdef: Any, state: Sequence[tuple[Path, Any]], inner: bool) -> Any:
    """Returns NNX objects made of a graph and a state.

    Args:
        graphdef: The graph of `split_nodes`.
        state: Pairs (path, variable or array).
        inner: True inside the traced function, where the objects are copies. If False, the original
            objects are changed and returned.
    """
    with nnx.merge_context(_TAG, inner=inner) as context:
        return context.merge(graphdef, nnx.from_flat_state(state))


def is_unchanged(after: Any, before: Any) -> bool:
    """Returns whether the graph after a call equals the graph before it.

    The graph after a call also holds the index that each object had before the call. The method
    `with_same_outer_index` adds these indices to the earlier graph, so that the two can be equal.
    """
    return same_structure(after, before.with_same_outer_index())


def same_structure(one: Any, other: Any) -> bool:
    """Returns whether two graphs have equal nodes and attributes.

    From Python 3.13 on, the dataclasses of a graph compare static values with `==`, which fails for
    arrays. Here the values are compared in tuples, in which an object equals itself.

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

    Only a static attribute of a graph has a ``value``.
    """
    for name, attribute in graphdef.attributes:
        if hasattr(attribute, "value"):
            yield name, attribute.value


def objects_in(roots: Any) -> Iterator[tuple[Path, Any]]:
    """Yields the path and the node of each node in ``roots``.

    The option ``graph`` of `nnx.iter_graph` is undocumented. Without it, NNX may walk a tree and
    yield a shared object twice.
    """
    yield from nnx.iter_graph(roots, graph=True)


# --- NNX: reading and writing -----------------------------------------------------------------


def raw_value(leaf: Any) -> Any:
    """Returns the value of a variable; any other leaf is returned unchanged.

    The documented ``variable[...]`` would run the variable's ``on_get_value`` hooks.
    """
    is_variable = isinstance(leaf, nnx.Variable) and not is_hijax(leaf)
    return leaf.get_raw_value() if is_variable else leaf


def metadata(leaf: Any) -> Any:
    """Returns the type and metadata (sharding names, hooks) of a variable, else None."""
    return (type(leaf), leaf.get_metadata()) if isinstance(leaf, nnx.Variable) else None


def is_hijax(x: Any) -> bool:
    """Returns whether a value is a hijax variable or the tracer of one.

    To JAX, a hijax variable is a value with a type of its own, and reads and writes of it are
    equations of the program. Its ``__class__`` is a variable class, but its type is not.
    """
    return isinstance(x, nnx.Variable) and not issubclass(type(x), nnx.Variable)


def with_metadata(value: Any, data: Any) -> Any:
    """Returns a variable's entry in a state: its value, or a variable if the value is a mapping.

    `nnx.from_flat_state` would read a mapping, such as `nnx.capture` puts into modules, as a part
    of the state's structure.

    Args:
        value: The value of the variable.
        data: The `metadata` of the variable.
    """
    if data is None or not isinstance(value, Mapping):
        return value
    kind, attributes = data
    return kind.from_metadata(value, attributes)


def write_again(variable: Any) -> None:
    """Writes a variable's own value back; Flax raises if the variable is of another trace."""
    variable.set_raw_value(variable.get_raw_value())


def assign(node: Any, name: str, value: Any) -> None:
    """Assigns an attribute of an object without the ``__setattr__`` of a user's class.

    Flax raises an error if the object is of another trace.
    """
    nnx.Pytree.__setattr__(node, name, value)


# --- NNX: paths of modules ----------------------------------------------------------------------

_NODES = "_pytree__nodes"


class _WithPath(HashableMapping[Any, Any]):
    """The static attribute ``_pytree__nodes`` of an NNX object, with the object's path.

    Every NNX object has this static attribute, which names its data attributes. A path in it
    survives the transformations of NNX, which a map from object identities would not. A mapping
    with a path equals one without, so that the path does not change the tree structure of a module.
    Two layers with different paths can still share the trace of a jitted method.
    """

    def __init__(self, nodes: Mapping[Any, Any], path: Path, owner: object) -> None:
        super().__init__(nodes)
        self.path = path
        self.owner = owner

    def update(self, other: Mapping[Any, Any]) -> _WithPath:
        """Returns the updated mapping, with its path; Flax calls this for a new attribute."""
        return _WithPath({**self, **other}, self.path, self.owner)


def give_path(module: Any, path: Path, owner: object) -> None:
    """Stores a path in a module, without the ``__setattr__`` of a user's class.

    Args:
        module: A traced copy of the caller's module.
        path: The keys that lead to the module.
        owner: An object that stands for the call; `take_path` needs it to remove the path.
    """
    vars(module)[_NODES] = _WithPath(vars(module)[_NODES], path, owner)


def path_of(module: Any) -> Path | None:
    """Returns the path that was given to a module or to its original; None without a path."""
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
_patched: dict[Method, list[Any]] = {}  # method -> [its original function, number of contexts]
_FLAX = frozenset(nnx.Module.__mro__)


def methods_of(cls: type) -> list[Method]:
    """Returns the methods of ``cls`` that may compute: ``__call__`` and non-dunder ones.

    Methods of ``nnx.Module`` itself (``eval``, ``sow``) are left out.

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

    NNX has no hook around the call of a module; `nnx.tabulate` replaces methods as well. Threads
    share the classes, so the last context that uses a method restores it.

    Args:
        methods: The methods.
        around: A function from a method's name and function to the new function.
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
    """Lifts a transformation of scope functions to a Linen class or function.

    Flax makes `nn.remat` and `nn.jit` in this way, by `lift_transform` from functions of
    `flax.core.lift`. Its documented interface has no way to add a transformation.
    """
    made: Any = transforms.lift_transform(transform, target, **options)
    pairs = [(made, target)]
    if isinstance(target, functools.partial):
        pairs.append((made.func, target.func))
    for new, old in pairs:
        if isinstance(new, type):  # undoes Flax's new name, which would rename variables
            new.__name__, new.__qualname__ = old.__name__, old.__qualname__
            new.__module__, new.__doc__ = old.__module__, old.__doc__
    return made


def packed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Makes a transformation of scope functions from a function of variables and random keys.

    `lift.pack` is the base of Flax's lifted transformations. All collections and keys become
    inputs, and all collections become outputs.

    Args:
        function: A function from (scope function, repacking function, variables, keys, *args,
            **kwargs) to the output and the changed variables.
        name: The name of the transformation in Flax's errors.
    """
    return lift.pack(function, (True,), (True,), (True,), name=name, enable_kwargs=True)
