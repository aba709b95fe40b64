"""Properties of a user's function that can be checked before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .errors import shown


def is_function(value: Any) -> bool:
    """Returns whether a value is callable and no class; passing a class is a mistake."""
    return callable(value) and not isinstance(value, type)


def name_of(fn: Any) -> str:
    """Returns the name of a function, or of a callable object's class, for messages."""
    return getattr(fn, "__name__", None) or type(fn).__name__


def has_hash(fn: Any) -> bool:
    """Returns whether ``fn`` is hashable, as a key of a cache must be."""
    try:
        hash(fn)
    except TypeError:
        return False
    return True


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature of a function, None for a builtin without one."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def positional_names(fn: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's positional parameters, [] for one without a signature."""
    signature = signature_of(fn)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds] if signature else []


def check_rule_like(fn: Callable[..., Any], what: str, argument: str) -> None:
    """Raises TypeError if a function option is not hashable, or does not take one argument.

    Args:
        fn: The function.
        what: The name of the option, for the message.
        argument: The argument of the function, for the message.
    """
    # An option must be hashable, because a wrapper compares and hashes its options.
    if not has_hash(fn):
        raise TypeError(
            f"{what} must be hashable, got {shown(fn)}. Use a function, or define __hash__ beside "
            "__eq__."
        )
    # Without this check, a wrong number of arguments raises in the middle of a trace, with frames
    # that the user has not written.
    signature = signature_of(fn)
    try:
        if signature is not None:
            signature.bind(None)
    except TypeError:
        raise TypeError(
            f"{what} must take one argument, {argument}, got "
            f"{getattr(fn, '__name__', repr(fn))}{signature}."
        ) from None
