"""Names of retired options and methods, with their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_FLOAT32 = "with_rules({'*': 'float32'}, scope=pattern)"
_HIGHEST = "with_rules({'*': 'highest'}, scope=pattern)"

RETIRED: Mapping[str, str] = MappingProxyType(
    {
        "BY_HAND": "Policy('bfloat16', level='by_hand')",
        "Emulated": "nothing: there are no emulated formats. Float8(emulate=True) rounds to 8 bits",
        "dot_output": "with_rules({'dot_general': 'FP32_APPEND_DTYPE'}) for float32 results",
        "kernels": "jmp_autocast.in_compute_dtype above the function of the kernel",
        "precisions": _HIGHEST,
        "scoped_rules": "with_rules({primitive: rule}, scope=pattern)",
        "scopes": _FLOAT32,
        "storage": "nothing: make a 16-bit array, such as a cache, where the program makes it",
        "weight_gradients": "level='by_hand', which rounds them",
        "with_level": "Policy(compute_dtype, level=...), or dataclasses.replace(policy, level=...)",
        "with_precision": _HIGHEST,
    }
)
"""The replacement of each retired option; the key "x" also stands for the method "with_x"."""


def instead_of(name: str) -> str:
    """Returns a sentence with the replacement of a retired name, "" for any other name.

    Example:
        >>> instead_of("with_precision")
        " Write with_rules({'*': 'highest'}, scope=pattern)."
    """
    found = RETIRED.get(name) or RETIRED.get(name.removeprefix("with_"))
    return f" Write {found}." if found else ""
