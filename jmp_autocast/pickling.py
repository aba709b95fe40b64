"""How pickle and copy see a wrapped function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def by_name_or_made(wrapper: Any, make: Callable[..., Any], *args: Any) -> Any:
    """Returns what ``__reduce__`` of a wrapper has to return.

    A decorated function goes by its name, as functions do: the name finds the wrapper, so pickle
    would not accept it for the function inside. ``__main__`` is another module in the process that
    reads the pickle; what is defined there goes by value, which cloudpickle can do.

    Args:
        wrapper: The wrapper, with the ``__module__`` and ``__qualname__`` of its function.
        make: The function that makes the wrapper.
        args: Its arguments.

    Example:
        >>> from jmp_autocast import autocast
        >>> by_name_or_made(autocast(len), autocast, len)
        (<function autocast at 0x...>, (<built-in function len>,))
    """
    # The wrapper took the name of its function, so pickle finds the wrapper under it.
    name = getattr(wrapper, "__qualname__", None)
    found: Any = sys.modules.get(wrapper.__module__)
    if name is not None and wrapper.__module__ != "__main__":
        for attribute in name.split("."):
            found = getattr(found, attribute, None)
    return name if found is wrapper else (make, args)
