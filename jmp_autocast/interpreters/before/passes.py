"""Runs the passes of this folder over a program and over the bodies of its equations."""

from __future__ import annotations

import functools
from typing import Any

from ..compat import AnyJaxpr, JaxprEqn, body_of
from ..compat.rebuilding import with_equations
from ..primitives.structure import bodies, with_bodies
from ..regions import RegionOf, Regions
from .calls_at_picks import calls_at_picks
from .numbers_cast import numbers_cast


class Preparation:
    """Prepares the jaxprs of a program: one instance per trace.

    Args:
        regions: The regions of the program.
    """

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._prepared: dict[tuple[int, tuple[str, ...]], tuple[Any, Any]] = {}

    def __call__(self, jaxpr: AnyJaxpr, path: tuple[str, ...] = ()) -> Any:
        """Returns the jaxpr to plan, the same object if no pass changes it or its bodies.

        A jaxpr that is called 96 times in equal scopes is prepared once, and stays one object.

        Args:
            jaxpr: An open or closed jaxpr.
            path: The enclosing scopes.
        """
        key = id(jaxpr), path
        if key not in self._prepared:
            # Kept alive with its result, or another jaxpr could get its id.
            self._prepared[key] = jaxpr, self._run(jaxpr, path)
        return self._prepared[key][1]

    def _run(self, jaxpr: AnyJaxpr, path: tuple[str, ...]) -> Any:
        region_of = functools.partial(self._regions.at, path)
        eqns = [self._with_bodies(eqn, region_of) for eqn in body_of(jaxpr).eqns]
        jaxpr = with_equations(jaxpr, eqns)
        return calls_at_picks(numbers_cast(jaxpr, region_of), region_of)

    def _with_bodies(self, eqn: JaxprEqn, region_of: RegionOf) -> Any:
        held = bodies(eqn)
        if not held or (region := region_of(eqn)).governed:
            return eqn
        prepared = [self(body.jaxpr, region.names) for body in held]
        is_same = all(a is body.jaxpr for a, body in zip(prepared, held, strict=True))
        return eqn if is_same else with_bodies(eqn, prepared)
