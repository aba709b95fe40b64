"""What a pass asks of the place where an equation stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from ...policies import CastPolicy, Policy
from ..regions import Region

RegionOf: TypeAlias = Callable[[Any], Region]


def is_lowered(region: Region) -> bool:
    """Returns whether anything is lowered there: elsewhere a program stays as it is written."""
    return region.compute_dtype is not None and region.island is None


def is_ruled(policy: Policy, region: Region, names: Iterable[str]) -> bool:
    """Returns whether the user says what becomes of one of some primitives.

    Args:
        policy: The policy of the program.
        region: The region of the equation.
        names: The names of the primitives.
    """
    return any(policy.rule_for(name, region.rules)[1] in ("rules", "registered") for name in names)


def has_function(policy: Policy, region: Region, name: str) -> bool:
    """Returns whether a function of the user's decides on a primitive, and looks at its equations.

    Args:
        policy: The policy of the program.
        region: The region of the equation.
        name: The name of the primitive.
    """
    return is_ruled(policy, region, [name]) and not isinstance(
        policy.rule_for(name, region.rules)[0], CastPolicy
    )
