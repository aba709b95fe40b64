"""jaxpr to jaxpr, before anything is planned: what is another transformation than mixed precision.

`passes.py` runs all of them over a program. Each is a file, takes the equations of one jaxpr, and
knows no dtype but the declared ones: `numbers_cast.py`, `calls_at_picks.py`.
"""

from .passes import Preparation

__all__ = ["Preparation"]
