"""Turns a function that changes Flax NNX objects into a pure function of their state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import errors, nnx

from ..call.arguments import InModules, Opened, name_of, param_positions, same_objects
from .flax_compat import (
    is_hijax,
    is_unchanged,
    merge_nodes,
    metadata,
    objects_in,
    raw_value,
    split_nodes,
    update_context,
    with_metadata,
)
from .nnx_checks import (
    arrays_as_data,
    check_no_hijax,
    check_writable,
    is_object,
    static_tracers,
)
from .nnx_scopes import module_scopes
from .results import dtypes_of

_NODE = object()  # the placeholder of an NNX object in a result
_ARGS, _KWARGS, _BOUND = range(3)  # the parts of a call: args, kwargs, arguments bound to `fn`


@dataclasses.dataclass(frozen=True)
class ModuleGraph:
    """The static part of a call: the structure of its arguments, and the graph of its NNX objects.

    Two calls with equal `ModuleGraph` share a trace. JAX keeps it with the trace, so it holds no
    array.

    Args:
        tree: The structure of (args, kwargs, bound), with NNX objects as leaves.
        leaves: For each leaf of ``tree``, its key in the values of the call; None for an NNX
            object.
        graphdef: The graph of the NNX objects.
        names: For each variable or array of the graph, its key in the values of the call.
        state: For each variable or array of the graph, its path, its key and its metadata.
    """

    tree: Any = dataclasses.field(hash=False)
    leaves: tuple[str | None, ...]
    graphdef: Any
    names: tuple[str, ...]
    state: list[Any] = dataclasses.field(compare=False)


class After(NamedTuple):
    """The static part of a call's result.

    Args:
        tree: The structure of the function's result, with NNX objects as leaves.
        is_node: Whether each leaf of ``tree`` is an NNX object.
        graphdef: The graph of the call's objects and of the returned objects, after the call.
        state: For each variable or array of the graph, its path, and the key of its value before
            the call; None in place of the key if the value changed.
        dtypes: The dtypes of the changed values.
    """

    tree: Any
    is_node: list[bool]
    graphdef: Any
    state: list[tuple[Any, str | None]]
    dtypes: list[Any]

    def arranged(self, out: Sequence[Any], nodes: Iterable[Any] = itertools.repeat(_NODE)) -> Any:
        """Returns the function's result, made of its arrays and its NNX objects or placeholders."""
        arrays, returned = iter(out), iter(nodes)
        leaves = [next(returned if is_node else arrays) for is_node in self.is_node]
        return jax.tree_util.tree_unflatten(self.tree, leaves)


@dataclasses.dataclass(frozen=True)
class Pure:
    """A function of NNX objects, as a pure function of a `ModuleGraph` and of arrays by key.

    Args:
        fn: The function, without its bound objects.
        name: The function's name in messages and profiles.
    """

    fn: Callable[..., Any]
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, graph: ModuleGraph, /, **values: Any) -> tuple[list[Any], list[Any], After]:
        """Returns the function's results, the values that it changed, and the static part of both.

        Unchanged state is not returned, because a module of an outer trace can be read but not
        written.
        """
        flat = [(path, with_metadata(values[name], data)) for path, name, data in graph.state]
        contents = {name: jax.tree.map(lambda x: x, values[name]) for _, name, _ in graph.state}
        nodes, _ = merge_nodes(graph.graphdef, flat, inner=True)
        objects = iter(nodes)
        full = [next(objects) if name is None else values[name] for name in graph.leaves]
        args, kwargs, bound = jax.tree_util.tree_unflatten(graph.tree, full)
        try:
            with module_scopes(nodes) as roots:
                out = self.fn(*bound[0], *args, **{**bound[1], **kwargs})
                leaves, tree = jax.tree_util.tree_flatten(out, is_leaf=is_object)
                roots += (returned := [x for x in leaves if is_object(x)])
        except errors.TraceContextError as error:
            raise TypeError(
                f"{self.name} changes the state of an NNX module that it closes over. Pass the "
                "module as an argument, or give autocast the module itself or its bound method."
            ) from error
        before = static_tracers(graph.graphdef)
        arrays_as_data(roots, before)
        graphdef, after = split_nodes((nodes, returned))
        if left := [name for i, name in static_tracers(graphdef).items() if i not in before]:
            raise TypeError(
                f"{self.name} leaves a traced array in the static attribute {left[0]!r} of an NNX "
                "object. Hold it in an nnx.Variable, or assign nnx.data(...)."
            )
        # Values are matched by identity: in a trace two arrays cannot be compared, and an unchanged
        # array is the same tracer.
        known = {id(values[name]): (name, data) for _, name, data in graph.state}
        state: list[tuple[Any, str | None]] = []
        changed: list[Any] = []
        for path, leaf in after:
            name, data = known.get(id(raw_value(leaf)), (None, None))
            # A container is compared by its contents, because `sow` changes it in place.
            is_same = name is not None and same_objects(raw_value(leaf), contents[name])
            if is_same and metadata(leaf) == data:
                state.append((path, name))
            else:
                state.append((path, None))
                changed.append(leaf)
        is_node = [is_object(x) for x in leaves]
        static = After(tree, is_node, graphdef, state, dtypes_of(changed))
        return [x for x in leaves if not is_object(x)], changed, static


@contextlib.contextmanager
def opened(
    fn: Callable[..., Any], params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Opened]:
    """Yields a call with the state of its NNX objects as arguments; `Opened.finish` puts it back.

    Args:
        fn: The function, module or bound method.
        params: Which arguments hold parameters, as in `Options.params`.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
    """
    with update_context():
        inner, bound = _open(fn)
        found, tree = jax.tree_util.tree_flatten_with_path((args, kwargs, bound), is_leaf=is_object)
        roots = [(path, leaf) for path, leaf in found if is_object(leaf)]
        nodes = [leaf for _, leaf in roots]
        graphdef, before = split_nodes((nodes, []))
        check_no_hijax(name_of(fn), before)
        modules = {roots[path[1]][0][:2] for path, x in before if isinstance(x, nnx.Param)}
        wanted = _param_predicate(fn, params, len(args), modules)
        values: dict[str, Any] = {}
        is_param: dict[str, bool] = {}

        def named(path: Any, leaf: Any) -> str:
            name = _name_of(path, values)
            values[name], is_param[name] = raw_value(leaf), wanted(path, leaf)
            return name

        leaves = tuple(None if is_object(leaf) else named(path, leaf) for path, leaf in found)
        state, untrained = [], []
        for path, leaf in before:
            _, i, *attributes = path
            name = named((*roots[i][0], *map(jax.tree_util.DictKey, attributes)), leaf)
            state.append((path, name, metadata(leaf)))
            # `nnx.grad` has no gradient for variables that are no `nnx.Param`, such as batch
            # statistics.
            if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.Param):
                untrained.append(name)
        names = tuple(name for _, name, _ in state)
        graph = ModuleGraph(tree, leaves, graphdef, names, state)

        # `path` may lead to an array in a container that a variable holds. Then `_known` returns
        # the path of the variable.
        def is_known(path: str) -> bool:
            return is_param[_known(path, is_param)]

        yield Opened(
            fn=Pure(inner, name_of(fn)),
            args=(graph,),
            kwargs=values,
            params=InModules(is_known) if params is None else is_known,
            untrained=lambda path: _known(path, is_param) in untrained,
            finish=functools.partial(_finish, nodes, graph, values),
        )


def _finish(nodes: list[Any], graph: ModuleGraph, values: dict[str, Any], result: Any) -> Any:
    """Writes the changed state into the caller's objects, and returns the function's result."""
    out, changed, after = result
    new = iter(changed)
    data = {name: data for _, name, data in graph.state}
    state = [
        (path, next(new) if name is None else with_metadata(values[name], data[name]))
        for path, name in after.state
    ]
    returned: Any = ()
    # If the graph is unchanged, only changed values are written: Flax raises an error if an object
    # of an outer trace is written, and a merge writes every object of the graph.
    if is_unchanged(after.graphdef, graph.graphdef):
        pairs = zip(state, graph.state, strict=True)
        moved = [item for item, (_, name, _) in pairs if raw_value(item[1]) is not values[name]]
        roots = (nodes, [])
        if moved:
            check_writable(roots, [path for path, _ in moved])
        nnx.update(roots, nnx.from_flat_state(moved))
    else:  # the structure of objects changed, or the result holds objects
        check_writable(nodes)
        _, returned = merge_nodes(after.graphdef, state, inner=False)
    return after.arranged(out, returned)


def holds_objects(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether the function or an argument of a call holds NNX objects.

    Objects with hijax variables do not count: they are pytrees of values, which need no split.
    """
    leaves = jax.tree_util.tree_leaves((args, kwargs, _open(fn)[1]), is_leaf=is_object)
    objects = [x for x in leaves if is_object(x)]
    return bool(objects) and not any(is_hijax(x) for _, x in objects_in(objects))


def _name_of(path: Any, taken: Container[str]) -> str:
    """Returns a unique path of a leaf in terms of the user's arguments: ``"0/dense/kernel"``."""
    root, *inside = path
    # For a bound argument, the two indices into (args, kwargs) are replaced by "self".
    inside = inside[2:] if root.idx == _BOUND else inside
    name = jax.tree_util.keystr(tuple(inside), simple=True, separator="/")
    name = f"self/{name}".rstrip("/") if root.idx == _BOUND else name
    while name in taken:  # two leaves may have one path if a key holds a "/"
        name += "'"
    return name


def _known(path: str, names: Container[str]) -> str:
    while path not in names:
        path = path.rpartition("/")[0]
    return path


def _open(fn: Any) -> tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Splits ``fn`` into a function and its bound arguments; a module counts as bound."""
    if isinstance(fn, functools.partial):
        inner, (args, kwargs) = _open(fn.func)
        return inner, ((*args, *fn.args), {**kwargs, **fn.keywords})
    if inspect.ismethod(fn) and is_object(fn.__self__):
        return fn.__func__, ((fn.__self__,), {})
    if is_object(fn):
        return operator.call, ((fn,), {})
    return fn, ((), {})


def _param_predicate(
    fn: Any, params: Any, count: int, modules: Container[Any]
) -> Callable[[Any, Any], bool]:
    """Returns a predicate: is the leaf at a path in (args, kwargs, bound) a parameter?

    Args:
        fn: The function.
        params: As for `opened`.
        count: The number of positional arguments.
        modules: The first two keys of the path of each argument that holds an ``nnx.Param``.
    """
    found: set[int] = set()
    if isinstance(params, tuple):
        found = param_positions(fn, params, count)

    def is_param(path: Any, leaf: Any) -> bool:
        root, *inside = path
        # A module that is `fn` or is bound to it is the model: all its state is parameters.
        if root.idx == _BOUND:
            return True
        # Variables of other types, such as batch statistics, are no parameters.
        if params is None and isinstance(leaf, nnx.Variable):
            return isinstance(leaf, nnx.Param)
        if params is None:
            return path[:2] in modules  # the first two keys are those of the argument
        if callable(params):
            return bool(params(jax.tree_util.keystr(tuple(inside), simple=True, separator="/")))
        return root.idx == _ARGS and inside[0].idx in found

    return is_param
