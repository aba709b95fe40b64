"""Scopes whose numbers are rounded to a format: another room says what is emitted there.

The room registers itself; nothing here, in `plan` or in `rewrite` imports it.
"""

from __future__ import annotations

from collections.abc import Callable

from ...policies import Decision
from .data import Place

_ROOMS: list[Callable[[Place], Decision | None]] = []


def emulates(room: Callable[[Place], Decision | None]) -> Callable[[Place], Decision | None]:
    """Registers what a room emits for an equation in such a scope: None to keep it as it is."""
    _ROOMS.append(room)
    return room


def emulation(at: Place) -> Decision | None:
    """Returns what is emitted in place of an equation, None where nothing of it is rounded.

    Args:
        at: The equation, in a scope that has a format.
    """
    found = (room(at) for room in _ROOMS)
    return next((decision for decision in found if decision is not None), None)
