"""Passes from jaxpr to jaxpr before planning, independent of mixed precision.

`passes.py` runs all of them over a program. Each is a file, takes the equations of one jaxpr, and
knows only declared dtypes: `numbers_cast.py`, `calls_at_picks.py`.
"""

from .passes import Preparation

__all__ = ["Preparation"]
