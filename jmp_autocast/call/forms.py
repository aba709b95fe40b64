"""Errors that show the correct call if `autocast` is called in the style of another library."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import jax

from ..policies import Policy
from ..policies.callables import name_of, signature_of
from ..policies.dtypes import find_dtype
from ..policies.errors import a, did_you_mean, shown

F = TypeVar("F", bound=Callable[..., Any])
LINE = "fn = autocast(fn, jnp.bfloat16)"
OPTIONS = ("policy", "params", "output_dtype", "enabled")
# Options of earlier versions, and their replacements.
_MOVED = {
    "compute_dtype": "policy=jnp.bfloat16",
    "level": "policy=Policy(jnp.bfloat16, level=...)",
    "residuals": "keep_less(autocast(fn), residuals=...)",
    "keep_scopes": "keep_less(autocast(fn), keep_scopes=...)",
    "on_unknown": "explain(fn, *args), which lists primitives without a rule",
    "compiler_options": "jax.jit(autocast(fn), compiler_options=...)",
}
# The names of the option for the compute dtype in PyTorch, Keras and Flax.
_COMPUTE_DTYPE = {"dtype", "fast_dtype", "precision", "param_dtype", "dtype_policy"}
_TORCH = {"device_type", "device", "cache_enabled"}
_TRANSFORM = "autocast is a function transform, not a context manager"


class NoContext:
    """The base class of the results of `autocast`: a ``with`` statement on one raises TypeError."""

    def __enter__(self) -> NoReturn:
        """Raises TypeError."""
        raise TypeError(
            "autocast is a function transform, as jax.jit is, not a context manager: with "
            f"autocast(...): has nothing to trace. Write {LINE}, or @autocast(policy=jnp.bfloat16) "
            "above the function. For a region inside the function write with full_precision():."
        )

    def __exit__(self, *error: object) -> None:
        """Does nothing, but must exist: ``with`` looks it up before it calls ``__enter__``."""


class Decorator(NoContext, functools.partial[Any]):
    """The result of `autocast` without a function: a decorator."""


def hide_mistakes(fn: F) -> F:
    """Removes from a function's signature the parameters that only collect wrong arguments."""
    signature = inspect.signature(fn)
    parameters = [p for p in signature.parameters.values() if not p.name.startswith("_")]
    vars(fn)["__signature__"] = signature.replace(parameters=parameters)
    return fn


def check_form(misplaced: tuple[Any, ...], given: Iterable[str]) -> None:
    """Raises TypeError for arguments that `autocast` does not have.

    Args:
        misplaced: Positional arguments after the function.
        given: The names of keyword arguments.
    """
    if misplaced:
        raise TypeError(
            f"autocast takes a function and a policy by position, got {shown(misplaced[0])} after "
            "them. Pass arguments of the function in a second call: autocast(fn)(params, x)."
        )
    for name in set(given).difference(OPTIONS):
        fix = did_you_mean(name, OPTIONS)
        if name in _MOVED:
            fix = f" Write {_MOVED[name]}."
        elif name in _COMPUTE_DTYPE:
            fix = f" {_TRANSFORM}, and the dtype of matmuls is its policy: write {LINE}."
        elif name in _TORCH:
            fix = f" {_ON_DEVICES}: write {LINE}."
        known = ", ".join(OPTIONS)
        raise TypeError(f"autocast has no option {name!r}.{fix} Its options are {known}.")


def check_options(by: str, fn: Any, given: Iterable[str]) -> None:
    """Raises TypeError if a tool's keyword arguments hold an option of `autocast`.

    Args:
        by: The name of the tool.
        fn: The function.
        given: The names of the keyword arguments for the function.
    """
    now = {name: f"{by}(autocast(fn, {name}=...), ...)" for name in OPTIONS} | _MOVED
    wrong = now.keys() & set(given)
    signature = signature_of(fn) if wrong else None
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return
    for name in wrong:
        if name not in signature.parameters:
            raise TypeError(
                f"{by} has no option {name!r}, and {name_of(fn)} has no such argument. Write "
                f"{now[name]}."
            )


def fix_of(value: Any) -> str:
    """Returns the fix to suggest if `autocast` got this value in place of a function.

    Example:
        >>> fix_of("cuda").split(": ")[0]
        'JAX knows the device of each array, and autocast is a function transform, not a context \
manager'
    """
    by_keyword = f"Write {LINE}, or @autocast(policy=...) above it."
    is_option = isinstance(value, Policy) or find_dtype(value) is not None
    if isinstance(value, str) and not is_option:
        return f"{_ON_DEVICES}: write {LINE}."
    if is_option:
        return by_keyword
    if callable(getattr(value, "apply", None)):  # the result of `hk.transform`
        return "Wrap the function that computes: autocast(model.apply)(params, ...)."
    if callable(getattr(value, "update", None)) and callable(getattr(value, "init", None)):
        return (
            "Wrap the loss, and not the optimizer, for which float16 has dynamic_loss_scaling: "
            f"{LINE}."
        )
    if any(hasattr(leaf, "shape") for leaf in jax.tree_util.tree_leaves(value)):
        return "Pass the function itself: autocast(fn)(params, x), and not autocast(fn(params, x))."
    return by_keyword


_ON_DEVICES = f"JAX knows the device of each array, and {_TRANSFORM}"


def check_linen(fn: Any, args: tuple[Any, ...] = ()) -> None:
    """Raises TypeError for a Flax Linen module or method that `autocast` cannot trace.

    While a module is called, Linen records its variables, and tracers of an inner trace would leak
    into them. A module from ``model.bind(variables)`` is accepted: its variables cannot change, so
    Linen records nothing.

    Args:
        fn: The function.
        args: The positional arguments of its call.
    """
    linen: Any = sys.modules.get("flax.linen")
    if linen is None:
        return
    candidates: tuple[Any, ...] = fn, getattr(fn, "__self__", None), *args[:1]
    for module in candidates:
        if not isinstance(module, linen.Module):
            continue
        name = type(module).__name__
        if module is fn and module.scope is None:
            raise TypeError(
                f"autocast got {a(name)}, a Flax Linen module, whose variables are not in it. Wrap "
                "its apply function: autocast(model.apply)(variables, x). For a part of a model "
                "write jmp_autocast.integrations.linen.autocast(nn.Dense)(8)."
            )
        if module.scope is not None and module.scope.mutable is not False:
            raise TypeError(
                f"autocast traces a method of {name}, a Flax Linen module that is being called: "
                "its variables would leak from the trace. Use autocast(model.apply), or for a part "
                "of a model jmp_autocast.integrations.linen.autocast."
            )
