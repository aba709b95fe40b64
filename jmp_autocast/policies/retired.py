"""Spellings that are gone, and what to write in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

_RULES = "with_rules({primitive: what}, scope=pattern)"

RETIRED: Mapping[str, str] = MappingProxyType(
    {
        "BY_HAND": "Policy('bfloat16', level='by_hand')",
        "Emulated": "nothing: there are no emulated formats. Float8(emulate=True) rounds to 8 bits",
        "dot_output": "with_rules({'dot_general': 'FP32_APPEND_DTYPE'}) for float32 results",
        "kernels": "jmp_autocast.in_compute_dtype above the function of the kernel",
        "precisions": "with_rules({'*': 'highest'}, scope=pattern)",
        "scoped_rules": _RULES,
        "scopes": "with_rules({'*': 'float32'}, scope=pattern)",
        "storage": "nothing: make a 16-bit array, such as a cache, where the program makes it",
        "weight_gradients": "level='by_hand', which rounds them",
        "with_kernels": "jmp_autocast.in_compute_dtype above the function of the kernel",
        "with_level": "Policy(compute_dtype, level=...), or dataclasses.replace(policy, level=...)",
        "with_precision": "with_rules({'*': 'highest'}, scope=pattern)",
        "with_scopes": "with_rules({'*': 'float32'}, scope=pattern)",
        "with_storage": "nothing: make a 16-bit array, such as a cache, where the program makes it",
    }
)


def instead_of(name: str) -> str:
    """Returns a sentence for a spelling that is gone, "" for any other.

    Example:
        >>> instead_of("with_precision")
        " Write with_rules({'*': 'highest'}, scope=pattern)."
    """
    return f" Write {RETIRED[name]}." if name in RETIRED else ""


def check_spelling(name: str, options: Iterable[str]) -> None:
    """Raises TypeError for an option that is gone.

    Args:
        name: What is called.
        options: The names of its options.
    """
    for option in options:
        if option in RETIRED:
            raise TypeError(f"{name} takes no {option}=.{instead_of(option)}")
