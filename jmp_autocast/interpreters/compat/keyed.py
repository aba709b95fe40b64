"""Keys of caches that hold an object without comparing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Keyed:
    """An object that is equal to another one if their keys are.

    Args:
        key: The key.
        of: The object, alive as long as this is.
    """

    key: Hashable
    of: Any = dataclasses.field(compare=False)
