"""Number formats of any bits, emulated in float32: parse one by its name, and round to it.

`policies/formats.py` says what a format is, `rounding.py` rounds to it, and `emulation.py` is what
planning calls for a scope that a policy gives a format, with a primitive of its own for gradients
(`rounded_cotangent.py`).
"""

from ..policies.formats import Format, parse
from . import emulation as emulation  # registers itself with planning
from .rounding import rounded

__all__ = ["Format", "parse", "rounded"]
