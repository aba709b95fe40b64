"""The state of Flax NNX objects around a pure function: out, through, and back in."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import errors, nnx

from ..arguments import AUTO, name_of, param_positions
from .flax_compat import is_unchanged, merge_nodes, metadata, raw_value, split_nodes
from .nnx_checks import arrays_as_data, check_writable, is_object, static_tracers
from .nnx_scopes import module_scopes
from .outputs import dtypes_of

_NODE = object()  # stands for an NNX object in a result
_ARGS, _BOUND = 0, 2  # the parts of a call: args, kwargs, bound


class Call:
    """One call: state out of the arguments, a pure function, state back into the arguments."""

    def __init__(self, fn: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> None:
        self._name = name_of(fn)
        self._fn, bound = _open(fn)
        found, self._tree = jax.tree_util.tree_flatten_with_path(
            (args, kwargs, bound), is_leaf=is_object
        )
        self._where = [i for i, (_, leaf) in enumerate(found) if is_object(leaf)]
        self._nodes = [found[i][1] for i in self._where]
        self._graphdef, self._before = split_nodes((self._nodes, []))
        self.values: list[Any] = [raw_value(leaf) for _, leaf in self._before]
        self.rest: list[Any] = [None if is_object(leaf) else leaf for _, leaf in found]
        # The traced function takes two lists, so the planner asks about the path "0/k" or "1/i".
        # The user's predicate and positions speak of the arguments of `fn`: both are translated.
        wanted = _param_predicate(fn, params, args, kwargs)
        marks = {
            f"1/{i}": wanted(path, None) for i, (path, x) in enumerate(found) if not is_object(x)
        }
        for k, ((_, i, *attributes), leaf) in enumerate(self._before):
            path = (*found[self._where[i]][0], *map(jax.tree_util.DictKey, attributes))
            marks[f"0/{k}"] = wanted(path, leaf)
        self.is_param: Callable[[str], bool] = lambda path: marks["/".join(path.split("/", 2)[:2])]

    def pure(self, state: list[Any], rest: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the function's outputs and the state that it changed.

        What did not change is no output: a module of an outer trace can be read, not written.
        """
        flat = [(path, x) for (path, _), x in zip(self._before, state, strict=True)]
        nodes, _ = merge_nodes(self._graphdef, flat, inner=True)
        full = list(rest)
        for i, node in zip(self._where, nodes, strict=True):
            full[i] = node
        args, kwargs, bound = jax.tree_util.tree_unflatten(self._tree, full)
        try:
            with module_scopes(nodes) as roots:
                out = self._fn(*bound[0], *args, **{**bound[1], **kwargs})
                leaves, self._out_tree = jax.tree_util.tree_flatten(out, is_leaf=is_object)
                roots += (returned := [x for x in leaves if is_object(x)])
        except errors.TraceContextError as error:
            raise TypeError(
                f"{self._name} changes the state of an NNX module that it closes over. Pass the "
                "module as an argument, or give autocast the module itself or its bound method."
            ) from error
        self._is_node = [is_object(x) for x in leaves]
        before = static_tracers(self._graphdef)
        arrays_as_data(roots, before)
        graphdef, after = split_nodes((nodes, returned))
        if left := [name for i, name in static_tracers(graphdef).items() if i not in before]:
            raise TypeError(
                f"{self._name} leaves a traced array in the static attribute {left[0]!r} of an NNX "
                "object. Hold it in an nnx.Variable, or assign nnx.data(...)."
            )
        self._graphdef_after = graphdef
        # By identity: a traced value that comes back untouched is the same object, and two values
        # cannot be compared in a trace.
        known = {id(x): i for i, x in enumerate(state)}
        self._after, changed = [], []
        for path, leaf in after:
            source = known.get(id(raw_value(leaf)))
            if source is not None and metadata(leaf) == metadata(self._before[source][1]):
                self._after.append((path, source))
            else:
                self._after.append((path, None))
                changed.append(leaf)
        self.dtypes: list[Any] = dtypes_of(changed)
        return [x for x in leaves if not is_object(x)], changed

    def finish(self, out: list[Any], changed: list[Any]) -> Any:
        """Writes the state into the caller's objects and returns the function's result."""
        new = iter(changed)
        after = [(path, next(new) if i is None else self.values[i]) for path, i in self._after]
        returned: Any = ()
        # Values alone are written one by one, because a module of an outer trace may be read. A
        # merge writes every object of the graph, and Flax raises for one of an outer trace.
        if is_unchanged(self._graphdef_after, self._graphdef):
            pairs = zip(after, self.values, strict=True)
            moved = [item for item, value in pairs if item[1] is not value]
            roots = (self._nodes, [])
            if moved:
                check_writable(roots, [path for path, _ in moved])
            nnx.update(roots, nnx.from_flat_state(moved))
        else:  # attributes came, went or changed, or the result holds NNX objects
            check_writable(self._nodes)
            _, returned = merge_nodes(self._graphdef_after, after, inner=False)
        return self.arranged(out, returned)

    def arranged(self, out: Sequence[Any], nodes: Iterable[Any] = itertools.repeat(_NODE)) -> Any:
        """Returns the function's result, of its arrays and of its NNX objects or stand-ins."""
        arrays, returned = iter(out), iter(nodes)
        leaves = [next(returned if is_node else arrays) for is_node in self._is_node]
        return jax.tree_util.tree_unflatten(self._out_tree, leaves)


def _open(fn: Any) -> tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Takes out of ``fn`` the modules that it brings: its own, or the bound ones."""
    if isinstance(fn, functools.partial):
        inner, (args, kwargs) = _open(fn.func)
        return inner, ((*args, *fn.args), {**kwargs, **fn.keywords})
    if inspect.ismethod(fn) and is_object(fn.__self__):
        return fn.__func__, ((fn.__self__,), {})
    if is_object(fn):
        return operator.call, ((fn,), {})
    return fn, ((), {})


def _param_predicate(
    fn: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any, Any], bool]:
    """Returns the predicate of a leaf's path in (args, kwargs, bound) and of the leaf."""
    found = set() if callable(params) else param_positions(fn, params, args, kwargs)

    def is_param(path: Any, leaf: Any) -> bool:
        root, *inside = path
        # What `fn` itself brings, as a module or a method, is the model.
        if root.idx == _BOUND:
            return True
        # NNX says what is a parameter: batch statistics and counters are variables, too.
        if params is AUTO and isinstance(leaf, nnx.Variable):
            return isinstance(leaf, nnx.Param)
        if callable(params):
            return bool(params(jax.tree_util.keystr(tuple(inside), simple=True, separator="/")))
        return getattr(inside[0], "idx" if root.idx == _ARGS else "key") in found

    return is_param
