"""The allowed words for options, and hints for words from other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from .errors import did_you_mean, shown

Level = Literal["tensor_cores", "o1", "compute", "by_hand"]
LEVELS: tuple[Level, ...] = get_args(Level)

_NO_BLOCKS = "There are no scales of blocks: write 'float8_row'."
# Hints for words from other libraries. A key is the name of an option, without its class, and the
# word in lower case.
_ELSEWHERE: dict[tuple[str, str], str] = {
    ("level", "o0"): "Apex's O0 is autocast(fn, enabled=False).",
    ("level", "o2"): "Apex's O2 is 'compute'; parameters stay float32.",
    ("level", "o3"): "Apex's O3 has 16-bit parameters: write 'compute', and cast_params them.",
    ("matmul", "fp8"): "Write matmul='float8'.",
    ("matmul", "e4m3"): "Write matmul='float8', whose weights and activations are e4m3.",
    ("matmul", "e5m2"): "Write matmul='float8', whose gradients are e5m2.",
    ("matmul", "hybrid"): "Write matmul='float8', which is e4m3 forward and e5m2 for gradients.",
    ("matmul", "delayed"): "Write matmul='float8': scales are those of the current values.",
    ("matmul", "fp4"): _NO_BLOCKS,
    ("matmul", "nvfp4"): _NO_BLOCKS,
    ("matmul", "mxfp8"): _NO_BLOCKS,
    ("matmul", "int8"): "There are no integer products: write matmul='float8'.",
    ("scaling", "block"): "There are no scales of blocks: write 'row'.",
    ("residuals", "remat"): "Write 'recompute', or 'auto'.",
}


def elsewhere(argument: str, value: Any) -> str:
    """Returns the hint for a word that another library uses, "" for any other word.

    Example:
        >>> elsewhere("matmul", "fp8")
        " Write matmul='float8'."
    """
    word = str(value).lower().removeprefix("float8_")
    found = _ELSEWHERE.get((argument.rsplit(".", 1)[-1], word.removesuffix("fn")))
    return f" {found}" if found else ""


def check_choice(argument: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises ValueError if ``value`` is not an allowed word; the message names the nearest one."""
    if value not in allowed:
        word = value if isinstance(value, str) else ""
        raise ValueError(
            f"{argument} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}."
            f"{elsewhere(argument, word) or did_you_mean(word, allowed)}"
        )
