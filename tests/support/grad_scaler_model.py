"""What PyTorch's GradScaler does to its scale, in plain Python.

Written from the behavior of ``torch.amp.GradScaler.update`` in PyTorch 2.13, whose kernel rounds
to float32. It shares no code and no array library with the implementation under test.
"""

from __future__ import annotations

import dataclasses
import math
import struct


def float32(value: float) -> float:
    """Rounds to the nearest float32; what is too large becomes infinite."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf


@dataclasses.dataclass
class GradScalerModel:
    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0

    def update(self, found_inf: bool) -> float:
        if found_inf:
            self.scale = float32(self.scale * self.backoff_factor)
            self.growth_tracker = 0
            return self.scale
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            grown = float32(self.scale * self.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self.growth_tracker = 0
        return self.scale
