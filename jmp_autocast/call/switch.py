"""The environment variable that turns `autocast` off without a change of the program."""

from __future__ import annotations

import os

VARIABLE = "JMP_AUTOCAST"
_OFF, _ON = ("0", "off", "false"), ("", "1", "on", "true")


def is_switched_off() -> bool:
    """Returns whether the environment turns every `autocast` of this process off.

    Raises:
        ValueError: The variable has an unknown value.

    Example:
        >>> is_switched_off()
        False
    """
    value = os.environ.get(VARIABLE, "")
    if value.lower() in _OFF:
        return True
    if value.lower() in _ON:
        return False
    raise ValueError(
        f"The environment variable {VARIABLE} must be 0 or off, to run without casts, or 1 or on, "
        f"got {value!r}. Set it to one of them, or unset it."
    )
