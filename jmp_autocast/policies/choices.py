"""The words that a policy's options may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from .errors import did_you_mean

Level = Literal["tensor_cores", "o1", "compute"]
DotOutput = Literal["compute", "consumer"]
WeightGradients = Literal["float32", "compute"]
LEVELS: tuple[Level, ...] = get_args(Level)
WORDS: dict[str, tuple[str, ...]] = {
    "level": LEVELS,
    "dot_output": get_args(DotOutput),
    "weight_gradients": get_args(WeightGradients),
}
"""The options of a policy that are words, by their names."""


def check_choice(argument: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises ValueError for what is none of the words, and names the nearest."""
    if value not in allowed:
        raise ValueError(
            f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}."
            f"{did_you_mean(str(value), allowed)}"
        )
