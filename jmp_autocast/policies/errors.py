"""Common parts of error messages."""

from __future__ import annotations

import difflib
import functools
import re
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import jax
import numpy as np

_WIDTH = 80  # the most characters of a value in a message
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
F = TypeVar("F", bound=Callable[..., Any])


class _Shown(reprlib.Repr):
    def repr1(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", None)
        if isinstance(x, np.generic):
            return repr(x)
        if isinstance(shape, tuple) and hasattr(x, "dtype") and not isinstance(x, type):
            return f"{x.dtype}[{','.join(map(str, shape))}]"
        if type(x) in (dict, list, tuple, set, frozenset, str):
            return super().repr1(x, level)
        if any(hasattr(leaf, "shape") for leaf in jax.tree_util.tree_leaves(x) if leaf is not x):
            return type(x).__name__
        return repr(x)


_shown = _Shown()
_shown.maxstring = _WIDTH


def shown(value: Any) -> str:
    """Returns a short text of a value for a message: arrays as types, and no addresses.

    The full text of a tree of parameters would push the start of the message off the terminal.

    Example:
        >>> import numpy as np
        >>> shown({"w": np.ones((2, 3), np.float32)}), shown("w")
        ("{'w': float32[2,3]}", "'w'")
    """
    text = _ADDRESS.sub("", _shown.repr(value))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def wrong_type(expected: str, value: Any, fix: str = "") -> TypeError:
    """Returns the error for a value of a wrong type.

    Args:
        expected: The rule that the value breaks, such as "params must be a position".
        value: The wrong value.
        fix: A sentence with the correct code.

    Example:
        >>> wrong_type("params must be a position", "w", "Write params=0.")
        TypeError("params must be a position, got 'w' of type str. Write params=0.")
    """
    return TypeError(
        f"{expected}, got {shown(value)} of type {type(value).__name__}. {fix}".rstrip()
    )


def a(word: str) -> str:
    """Returns a word with its article.

    Example:
        >>> a("dict"), a("Optimizer")
        ('a dict', 'an Optimizer')
    """
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns a sentence that names the nearest match, "" for none.

    Args:
        name: The unknown name.
        known: The known names.
        cutoff: The least similarity of a match, from 0 to 1. At 0.5 "compte" finds "compute", and
            "qqqq" finds nothing.
    """
    known = sorted(known)
    # A name with the same letters in another order comes first: "tahn" is "tanh" and not "tan".
    nearest = [each for each in known if sorted(each) == sorted(name)]
    nearest += difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def with_usage(line: str) -> Callable[[F], F]:
    """Decorates a function so that the TypeError of a wrong call ends with a correct call.

    Example:
        >>> @with_usage("double(3)")
        ... def double(x):
        ...     return 2 * x
        >>> double()
        Traceback (most recent call last):
            ...
        TypeError: double() missing 1 required positional argument: 'x'. Write double(3).
    """

    def decorated(fn: F) -> F:
        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except TypeError as error:
                # If Python refuses the arguments, the traceback has no frame of `fn`. Any other
                # TypeError comes from inside `fn`, and is raised unchanged.
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                raise TypeError(f"{error}. Write {line}.") from None

        return cast(F, called)

    return decorated
