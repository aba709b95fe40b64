"""Cache keys that hold an object alive without comparing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Keyed:
    """An object that is compared and hashed by a key.

    Args:
        key: The key.
        of: The object, which lives as long as this instance.
    """

    key: Hashable
    of: Any = dataclasses.field(compare=False)
