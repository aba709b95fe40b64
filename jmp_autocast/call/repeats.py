"""One warning for repeated calls outside of `jit`, which trace and compile each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

clock: Callable[[], float] = time.perf_counter
LIMIT: float = 0.1
"""Seconds that the repeats of one wrapper may take together before it warns."""

_JITS = {"flax.": "nnx.jit", "equinox.": "eqx.filter_jit"}


class Repeats:
    """The cost of repeated calls of one wrapper with the same types, outside of `jit`."""

    def __init__(self) -> None:
        self._types: Any = None
        self._calls = 0
        self._seconds = 0.0
        self._has_warned = False

    def warning(self, arrays: Sequence[Any], seconds: float, name: str, by: Any) -> str:
        """Counts one more call, and returns the text of a warning, "" for none.

        Args:
            arrays: The arrays of the call, or their types.
            seconds: The seconds that the call took.
            name: The function's name.
            by: The function.
        """
        # A hijax variable of Flax has neither.
        types = [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in arrays]
        if types != self._types:
            # The first call with these types has to trace and compile.
            self._types, self._calls, self._seconds = types, 1, 0.0
            return ""
        self._calls, self._seconds = self._calls + 1, self._seconds + seconds
        if self._has_warned or self._seconds <= LIMIT:
            return ""
        self._has_warned = True
        module = type(by).__module__
        jit = next((jit for start, jit in _JITS.items() if module.startswith(start)), "jax.jit")
        is_inside = hasattr(by, "lower") and hasattr(by, "__wrapped__")
        where = f", with {jit} outside of autocast, not inside" if is_inside else ""
        return (
            f"{name} was called {self._calls} times outside of jit with arguments of the same "
            f"types, and autocast traces, plans and compiles it again at each call: the repeats "
            f"took {self._seconds:.2g} s. Write fn = {jit}(autocast({name})){where}."
        )
