"""What tables say of a row: its dtypes and its reason, in few letters."""

from __future__ import annotations

from .rows import Row

_SHORT = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "float8_e4m3fn": "f8",
}


def short_dtypes(row: Row) -> str:
    """Returns the dtypes of operands and results, such as ``"bf16 -> f32"``."""
    ends = [[_SHORT.get(name, name) for name in names] for names in (row.operands, row.results)]
    return " -> ".join(", ".join(dict.fromkeys(names)) for names in ends)


def reason_of(row: Row) -> str:
    """Returns the code of the reason, with its cause."""
    return f"{row.reason} ({row.cause})" if row.cause else row.reason
