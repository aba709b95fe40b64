"""The precisions of float32 products, as the words that a policy or its file holds."""

from __future__ import annotations

from typing import Any

from jax import lax

from .choices import check_choice
from .errors import wrong_type

# The algorithms for float32 operands. JAX's other presets are for 16-bit and 8-bit operands.
_PRESETS = {
    preset.name.lower(): preset
    for preset in lax.DotAlgorithmPreset
    if preset.name.startswith(("F32", "TF32", "BF16_BF16_F32"))
}
_LEVELS = {level.name.lower(): level for level in lax.Precision}
PRECISIONS: tuple[str, ...] = (*_LEVELS, *_PRESETS)


def as_precision(value: Any, argument: str) -> str:
    """Returns the name of a precision of float32 products, in lower case.

    Args:
        value: A ``lax.Precision``, a ``lax.DotAlgorithmPreset``, or the name of one.
        argument: The argument's name, for messages.

    Example:
        >>> from jax import lax
        >>> as_precision(lax.DotAlgorithmPreset.TF32_TF32_F32, "precision")
        'tf32_tf32_f32'
    """
    word = value.name if isinstance(value, lax.Precision | lax.DotAlgorithmPreset) else value
    if not isinstance(word, str):
        fix = "Write 'highest' or 'tf32_tf32_f32_x3', for example."
        raise wrong_type(f"{argument} must be the name of a precision", value, fix)
    check_choice(argument, word.lower(), PRECISIONS)
    return word.lower()


def is_precision(value: Any) -> bool:
    """Returns whether a value is a precision or the name of one.

    Example:
        >>> is_precision("highest"), is_precision(lax.Precision.HIGH), is_precision("float32")
        (True, True, False)
    """
    if isinstance(value, str):
        return value.lower() in PRECISIONS
    return isinstance(value, lax.Precision | lax.DotAlgorithmPreset)


def is_algorithm(word: str) -> bool:
    """Returns whether a precision is a dot algorithm, which only ``dot_general`` takes."""
    return word in _PRESETS


def precision_of(word: str) -> lax.Precision | lax.DotAlgorithmPreset:
    """Returns the JAX object that a precision's name stands for."""
    return _PRESETS.get(word) or _LEVELS[word]


def precision_around(flag: str | None) -> str | None:
    """Returns the precision that ``jax_default_matmul_precision`` sets; None if it sets none.

    Example:
        >>> precision_around("float32"), precision_around("TF32_TF32_F32")
        ('highest', 'tf32_tf32_f32')
        >>> precision_around("default"), precision_around(None)
        (None, None)
    """
    if flag is None or flag.lower() in _PRESETS:
        return flag and flag.lower()
    try:
        level = lax.Precision(flag)
    except ValueError:  # an algorithm for operands that are not float32
        return None
    return None if level is lax.Precision.DEFAULT else level.name.lower()
