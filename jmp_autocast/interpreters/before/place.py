"""What a pass asks of the place where an equation stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ...policies import CastPolicy, Policy
from ..regions import Region

RegionOf: TypeAlias = Callable[[Any], Region]


def is_lowered(region: Region) -> bool:
    """Returns whether anything is lowered there: elsewhere a program stays as it is written."""
    return region.compute_dtype is not None and region.island is None


def has_function(policy: Policy, region: Region, name: str) -> bool:
    """Returns whether a function of the user's decides on a primitive, and looks at its equations.

    Args:
        policy: The policy of the program.
        region: The region of the equation.
        name: The name of the primitive.
    """
    rule, origin = policy.rule_for(name, region.rules)
    return origin in ("rules", "registered") and not isinstance(rule, CastPolicy)
