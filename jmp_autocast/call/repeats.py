"""Calls outside of `jit` that trace and compile again what they did before: one warning."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

clock: Callable[[], float] = time.perf_counter
LIMIT: float = 0.1
"""Seconds that the repeats of one wrapper may take together before it says so."""

_JITS = {"flax.": "nnx.jit", "equinox.": "eqx.filter_jit"}


class Repeats:
    """What calls of one wrapper outside of `jit` have cost, after the first with the same types."""

    def __init__(self) -> None:
        self._types: Any = None
        self._calls = 0
        self._seconds = 0.0
        self._is_told = False

    def warning(self, arrays: Sequence[Any], seconds: float, name: str, by: Any) -> str:
        """Counts one more call, and returns what to warn of: "" for nothing.

        Args:
            arrays: The arrays of the call, or what stands for them.
            seconds: How long it took.
            name: The function's name.
            by: The function.
        """
        # A variable that a trace may change, such as a hijax variable of Flax, has neither.
        types = [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in arrays]
        if types != self._types:
            # The first call with these types has to trace and compile.
            self._types, self._calls, self._seconds = types, 1, 0.0
            return ""
        self._calls, self._seconds = self._calls + 1, self._seconds + seconds
        if self._is_told or self._seconds <= LIMIT:
            return ""
        self._is_told = True
        module = type(by).__module__
        jit = next((jit for start, jit in _JITS.items() if module.startswith(start)), "jax.jit")
        is_inside = hasattr(by, "lower") and hasattr(by, "__wrapped__")
        where = f", with {jit} outside of autocast, not inside" if is_inside else ""
        return (
            f"{name} was called {self._calls} times outside of jit with arguments of the same "
            f"types, and autocast traces, plans and compiles it again at each call: the repeats "
            f"took {self._seconds:.2g} s. Write fn = {jit}(autocast({name})){where}: that does so "
            "once."
        )
