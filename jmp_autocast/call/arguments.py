"""Arguments and outputs of a call: arrays are traced, everything else is static."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import keyword
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..float8.dequantize import QuantizedArray, arrays_of, is_quantized, next_of
from ..interpreters import Planner
from ..interpreters.compat import AnyJaxpr, mark_frames
from ..interpreters.plan.data import Source
from ..policies.callables import (
    check_rule_like,
    is_function,
    name_of,
    positional_names,
    signature_of,
)
from ..policies.errors import did_you_mean, shown, wrong_type
from ..policies.rules import unmatched_patterns
from ..scopes import read_mark
from .forms import check_linen
from .outputs import check_returned
from .params import is_module, root_of, with_weights

mark_frames(__file__)


Params: TypeAlias = int | Sequence[int] | Callable[[str], bool] | None
"""Positions of arguments, a predicate of an array's path, or None to infer them."""


# Kinds of functions that compute after the trace is over, and would silently run in float32.
_LAZY = {
    "a generator": inspect.isgeneratorfunction,
    "a coroutine": inspect.iscoroutinefunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
}


def check_function(fn: Any, by: str, fix: str) -> None:
    """Raises TypeError for a value that is no function, or is a generator or coroutine function.

    Args:
        fn: The value.
        by: The public function that takes ``fn``, for messages.
        fix: The sentence with the fix, for a value that is not callable.
    """
    # Scalar types such as jnp.bfloat16 are callable, but no functions.
    numpy_scalar = isinstance(fn, type) and issubclass(fn, np.generic)
    if not callable(fn) or type(fn) is type(jnp.float32) or numpy_scalar:
        raise wrong_type(f"{by} takes a callable", fn, fix)
    # For a class with `__call__`, the trace would see only the construction of an object.
    if isinstance(fn, type) and any("__call__" in vars(base) for base in fn.__mro__):
        raise TypeError(
            f"{by} takes a function, and {fn.__name__} is a class: a call of it only makes an "
            "object. Wrap the function that calls the object, or decorate the class's __call__. "
            "For a Flax Linen class use jmp_autocast.integrations.linen.autocast."
        )
    # A callable object computes later if its `__call__` is a generator or coroutine function.
    own_call = getattr(type(fn), "__call__", None)  # noqa: B004 - not to test for a callable
    for what, is_lazy in _LAZY.items():
        if is_lazy(fn) or is_lazy(own_call):
            raise TypeError(
                f"{by} takes a function that returns its result, and {name_of(fn)} returns "
                f"{what}, which computes after the trace is over. Apply {by} to the function "
                "that it calls."
            )


def check_params(params: Any) -> Any:
    """Returns ``params`` in a hashable form; raises TypeError for an invalid value."""
    if params is None:
        return None
    if is_function(params):
        check_rule_like(params, "params", "the path of an array, a string")
        return params
    positions = params if isinstance(params, tuple | list) else (params,)
    if all(isinstance(i, int) and not isinstance(i, bool) for i in positions):
        return tuple(positions)
    raise TypeError(
        "params must be the position of an argument, several positions, or a predicate of an "
        f"array's path such as lambda path: path.startswith('0/'), got {shown(params)}."
    )


def check_params_in_range(fn: Callable[..., Any], params: Any) -> None:
    """Raises ValueError if a position in ``params`` is beyond the signature of ``fn``."""
    signature = signature_of(fn) if isinstance(params, tuple) else None
    if signature is None:  # `params` has no positions, or `fn` is a builtin
        return
    # A function with `*args` takes any number of arguments; its positions are checked at the call.
    if all(p.kind is not p.VAR_POSITIONAL for p in signature.parameters.values()):
        count = len(positional_names(fn))
        _check_range(params, count, f": {name_of(fn)} takes ", ", numbered from 0.")


def param_positions(fn: Callable[..., Any], params: tuple[int, ...], count: int) -> set[int]:
    """Returns ``params`` as non-negative positions in a call with ``count`` positional arguments.

    Raises:
        ValueError: A position is out of range.
    """
    after = (
        f" in this call of {name_of(fn)}. Pass the parameters by position, or give params a "
        "predicate of an array's path."
    )
    _check_range(params, count, " of the ", after)
    return {i % count for i in params}


def _check_range(params: tuple[int, ...], count: int, before: str, after: str) -> None:
    arguments = f"{before}{count} positional argument{'s' * (count != 1)}{after}"
    for i in params:
        if not -count <= i < count:
            raise ValueError(f"params={i} is out of range{arguments}")


@dataclasses.dataclass
class Call:
    """One call of a function, flattened.

    Args:
        arrays: The array leaves of the arguments.
        sources: Whether each array is a parameter or data.
        paths: The path of each array in the arguments, such as ``"0/dense/kernel"``.
        traceable: A function from the array leaves of the arguments to the array leaves of the
            result.
        unflatten: A function from the result's array leaves to the result, with its static leaves.
        infers_params: Whether parameters are inferred from the traced program.
    """

    arrays: list[Any]
    sources: list[Source]
    paths: list[str]
    traceable: Callable[..., list[Any]]
    unflatten: Callable[[Sequence[Any]], Any]
    infers_params: bool = False

    def look_at(self, traced: AnyJaxpr) -> None:
        """If `infers_params`, finds the parameters from the closed jaxpr of `traceable`."""
        if self.infers_params:
            self.sources = list(with_weights(self.paths, self.sources, traced))

    @property
    def is_param(self) -> list[bool]:
        """Whether each array is a parameter."""
        return [source is Source.PARAM for source in self.sources]

    @property
    def shapes(self) -> list[Any]:
        """Values with the shapes and dtypes of the arrays."""
        return [x if hasattr(x, "shape") else jax.typeof(x) for x in self.arrays]


@dataclasses.dataclass(frozen=True)
class InModules:
    """A predicate that is True for paths of known parameters; further parameters are inferred."""

    is_param: Callable[[str], bool]


class Opened(NamedTuple):
    """A call whose mutable objects are replaced by arrays and static values.

    Args:
        fn: The function.
        args: The positional arguments of ``fn``.
        kwargs: The keyword arguments of ``fn``.
        params: The value of ``params`` for `flatten`.
        untrained: A predicate of an array's path, True if the framework takes no gradient with
            respect to the array.
        finish: A function that writes the new state into the caller's objects. It takes the result
            of ``fn`` and returns the result of the caller's function.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    params: Any = ()
    untrained: Callable[[str], bool] = lambda path: False
    finish: Callable[[Any], Any] = lambda result: result


def flatten(
    fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    abstract: bool = False,
) -> Call:
    """Flattens a call of ``fn``.

    Args:
        fn: The function.
        params: The result of `check_params`.
        args: Positional arguments, any pytrees.
        kwargs: Keyword arguments, any pytrees.
        abstract: Whether a ``jax.ShapeDtypeStruct`` counts as an array.

    Raises:
        ValueError: ``params`` is out of range.
        TypeError: While tracing, ``fn`` changed the state of a module.
    """
    check_linen(fn, args)
    # Arrays are traced and all other leaves are static, as in `equinox.filter_jit`.
    with_path, tree = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_quantized)
    leaves = [leaf for _, leaf in with_path]
    stand_ins = (jax.ShapeDtypeStruct, QuantizedArray) if abstract else (QuantizedArray,)
    dynamic = [i for i, x in enumerate(leaves) if is_array(x) or isinstance(x, stand_ins)]
    is_param = _param_predicate(fn, params, args, kwargs)
    parts = [
        (_path_of(with_path[i][0]) + end, x) for i in dynamic for end, x in arrays_of(leaves[i])
    ]
    paths = [path for path, _ in parts]
    kinds = [Source.PARAM if is_param(path) else Source.DATA for path in paths]
    if is_function(params) and paths and Source.PARAM not in kinds:
        some = ", ".join(map(repr, paths[:4]))
        warnings.warn(
            f"The predicate params= selects no array of {name_of(fn)}, so that all are data. Paths "
            f"begin with the position or name of an argument: {some}. params=() selects none.",
            stacklevel=4,
        )
    # Filled when the function has run: the structure of its result and the static leaves.
    result: dict[str, Any] = {}

    def traceable(*arrays: Any) -> list[Any]:
        full = list(leaves)
        # Each trace gets fresh containers, so that changes by the function can be found.
        given = iter(arrays)
        for i in dynamic:
            full[i] = next_of(given, leaves[i])
        own_args, own_kwargs = jax.tree_util.tree_unflatten(tree, full)
        try:
            out = fn(*own_args, **own_kwargs)
        except Exception as error:  # any error of the user's code; raised again
            _explain_mutation(error, fn)
            raise
        _check_unchanged((own_args, own_kwargs), tree, full, fn)
        out_leaves, result["tree"] = jax.tree_util.tree_flatten(out)
        for leaf in out_leaves:
            if not is_array(leaf):
                check_returned(leaf, name_of(fn))
        result["leaves"] = [None if is_array(x) else (x,) for x in out_leaves]
        return [x for x in out_leaves if is_array(x)]

    def unflatten(outputs: Sequence[Any]) -> Any:
        arrays = iter(outputs)
        full = [next(arrays) if static is None else static[0] for static in result["leaves"]]
        return jax.tree_util.tree_unflatten(result["tree"], full)

    # JAX requires a name that UTF-8 can encode.
    traceable.__name__ = name_of(fn).encode(errors="backslashreplace").decode()
    # The name and signature make JAX's errors name the user's arguments: "batch", not "args[1]".
    traceable.__dict__["__wrapped__"] = fn
    traceable.__dict__["__signature__"] = _flat_signature(fn, paths)
    infers_params = params is None or isinstance(params, InModules)
    return Call([x for _, x in parts], kinds, paths, traceable, unflatten, infers_params)


def _flat_signature(fn: Callable[..., Any], paths: Sequence[str]) -> inspect.Signature:
    """Returns a signature with a parameter for each array leaf, such as ``params_w``."""
    names = positional_names(fn)
    parameters: dict[str, inspect.Parameter] = {}
    for path in paths:
        first, *rest = path.split("/")
        if first.isdigit():
            first = names[int(first)] if int(first) < len(names) else f"args_{first}"
        name = re.sub(r"\W", "_", "_".join([first, *rest]))
        while name in parameters or keyword.iskeyword(name):
            name += "_"
        parameters[name] = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature(list(parameters.values()))


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is traced: an array, a NumPy array or scalar, or a tracer."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) or hasattr(leaf, "__jax_array__")


def _path_of(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf: "0/dense/kernel", or "name/..." for a keyword argument."""
    return jax.tree_util.keystr(path[1:], simple=True, separator="/")


def _param_predicate(
    fn: Callable[..., Any], params: Any, args: tuple, kwargs: dict[str, Any]
) -> Callable[[str], bool]:
    if isinstance(params, InModules):
        return params.is_param
    if callable(params):
        return cast(Callable[[str], bool], params)
    if params is None:
        named = itertools.chain(enumerate(args), kwargs.items())
        roots = {str(name) for name, x in named if is_module(x)}
    else:
        roots = {str(i) for i in param_positions(fn, params, len(args))}
    return lambda path: root_of(path) in roots


def _check_unchanged(arguments: Any, tree: Any, leaves: list[Any], fn: Any) -> None:
    """Raises TypeError if ``fn`` changed an object in its arguments: the change would be lost."""
    given = jax.tree_util.tree_unflatten(tree, leaves)
    if same_objects(arguments, given):
        return
    before = jax.tree_util.tree_leaves(given, is_leaf=_is_opaque)
    now = jax.tree_util.tree_leaves(arguments, is_leaf=_is_opaque)
    # A list or dict that grew is no error, because it keeps its length under `jit` and `grad`, too.
    if len(before) != len(now):
        return
    for old, new in zip(before, now, strict=True):
        if not same_objects(old, new, unreadable=True) and not jax.tree_util.all_leaves([old]):
            raise TypeError(_mutation_message(fn, type(new).__name__))


def same_objects(one: Any, other: Any, unreadable: bool = False) -> bool:
    """Returns whether two trees have one structure and hold the same objects.

    Args:
        one: A tree.
        other: Another tree.
        unreadable: The result if flattening raises, as for a used `equinox.nn.State`.
    """
    try:
        leaves, tree = jax.tree_util.tree_flatten(one)
        others, other_tree = jax.tree_util.tree_flatten(other)
    except Exception:  # any error of a pytree node's class
        return unreadable
    return tree == other_tree and all(a is b for a, b in zip(leaves, others, strict=True))


def _is_opaque(node: Any) -> bool:
    return type(node) not in (tuple, list, dict, type(None))


def _explain_mutation(error: Exception, fn: Any) -> None:
    """If ``error`` is Flax's error about a module of an outer trace, raises an error with a fix."""
    flax_errors = sys.modules.get("flax.errors")
    if flax_errors is not None and isinstance(error, flax_errors.TraceContextError):
        owner = getattr(fn, "__self__", fn)
        module = type(owner).__name__ if not inspect.isfunction(owner) else "an NNX module"
        raise TypeError(_mutation_message(fn, module)) from error


def _mutation_message(fn: Any, module: str) -> str:
    return (
        f"{name_of(fn)} changes the state of {module} (batch statistics, an RNG counter, a cache) "
        "while autocast traces it, and the change would be lost. Use "
        "jmp_autocast.integrations.nnx.autocast, which carries the state; the tools carry it, too, "
        "once that is imported. If the change may be lost, as under jax.jit, write "
        "nnx.merge(graphdef, state, copy=True). Otherwise return the new state from the function."
    )


def report_unmatched(planner: Planner, fn: Any) -> None:
    """Warns about scope patterns of a policy that match nothing in a program.

    Args:
        planner: The planner of the program.
        fn: The function, for the message.
    """
    patterns = unmatched_patterns(planner.policy, planner.regions.scopes)
    names = {name for scope in planner.regions.scopes for name in scope if read_mark(name) is None}
    if planner.has_rules:
        # A derivative rule of the user is traced later, and may add scopes inside the known ones,
        # so a pattern that starts with a known scope may still match.
        patterns = [p for p in patterns if p.split("/")[0] not in names]
    if not patterns:
        return
    found = did_you_mean(patterns[0].strip("*/"), names)
    if not found:
        some = ", ".join(sorted(names)[:8])
        found = f" Its scopes are {some}." if names else " It has no named scopes."
    warnings.warn(
        f"No equation of {name_of(fn)} is in a scope that matches "
        f"{', '.join(map(repr, patterns))}: these rules of the policy do nothing.{found} "
        "jmp_autocast.explain lists the scope of each equation.",
        stacklevel=4,
    )
