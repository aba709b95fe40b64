"""Calls of a tool that do not fit the user's function: what to write instead."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from ..policies.callables import name_of, signature_of
from ..policies.errors import shown, with_usage
from .forms import OPTIONS

F = TypeVar("F", bound=Callable[..., Any])

# What Python says of a call that does not fit a signature.
_REFUSED = re.compile(r"missing \d+|takes .* argument|unexpected keyword|multiple values")


def of_a_call(usage: str) -> Callable[[F], F]:
    """Decorates a tool ``(fn, *args, **kwargs)`` that looks at a call of ``fn``.

    Args:
        usage: How the tool is called.
    """

    def decorated(tool: F) -> F:
        inner = with_usage(usage)(tool)
        parameters = inspect.signature(tool).parameters.values()
        own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

        @functools.wraps(tool)
        def called(*args: Any, **kwargs: Any) -> Any:
            given = {name: kwargs[name] for name in own if kwargs.get(name) is not None}
            rest = {name: value for name, value in kwargs.items() if name not in own}
            if args:
                _check_own(args[0], tool.__name__, args[1:], given)
            try:
                return inner(*args, **kwargs)
            except TypeError as error:
                hint = _misfit(args[0], tool.__name__, args[1:], rest) if args else ""
                # A signature may say something else than the function takes: it is asked for where
                # Python refused the call.
                if not hint or _REFUSED.search(str(error)) is None:
                    raise
                raise TypeError(hint) from None

        return cast(F, called)

    return decorated


def _check_own(fn: Any, by: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Raises TypeError for an option of a tool that is also an argument of the function."""
    signature = signature_of(fn) if given and callable(fn) else None
    if signature is None:
        return
    bound = getattr(fn, "keywords", {})
    try:
        bound = {**bound, **signature.bind_partial(*args).arguments}
    except TypeError:
        return
    for name in given:
        parameter = signature.parameters.get(name)
        if parameter is not None and name not in bound:
            raise TypeError(
                f"{name}={shown(given[name])} is for {by}, and {name_of(fn)} has an argument "
                f"{name!r} as well. Bind that one: {by}(functools.partial(fn, {name}=...), ...)."
            )


def _misfit(fn: Any, by: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns what is wrong with a call of a function, "" where its signature takes it."""
    signature = signature_of(fn) if callable(fn) else None
    if signature is None:
        return ""
    try:
        signature.bind(*args, **kwargs)
        return ""
    except TypeError as error:
        why = str(error)
    name, takes = name_of(fn), ", ".join(signature.parameters)
    start = f"{by} calls {name}({takes}) with what follows it: {why}. "
    options = (k for k in kwargs if k in OPTIONS)
    known = signature.parameters
    unknown = next((k for k in options if k not in known or f"argument {k!r}" in why), None)
    if unknown is not None:
        return f"{start}{unknown} is an option of autocast: {by}(autocast(fn, {unknown}=...), ...)."
    if len(args) == 1 and isinstance(args[0], tuple):
        return f"{start}One tuple is one argument: write {by}({name}, *arguments)."
    return f"{start}Write {by}({name}, {takes})."
