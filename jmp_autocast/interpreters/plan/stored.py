"""What a policy stores in 16 bits: it stays so where something is written into it, and in loops."""

from __future__ import annotations

import dataclasses

import numpy as np

from ...policies import DATA_MOVEMENT, FLOAT32, Policy
from ...policies.storage import is_stored
from ..compat import argument_paths, body_of
from ..primitives.structure import Body
from ..primitives.traits import having
from .basic_plans import in_dtype
from .data import EquationPlan, Place
from .reasons import Reason, ReasonCode

_KEEPS = having("writes") | DATA_MOVEMENT


def written(at: Place) -> EquationPlan | None:
    """Returns the plan of what writes into a stored array, or moves it, None for all else.

    What is written is cast: a cache that is read in 16 bits alone has no use for more, and wider it
    would be copied as a whole at each step.
    """
    stored = [i for i in at.floats if at.given[i].is_stored]
    if not stored or at.name not in _KEEPS or at.region.governed:
        return None
    i = stored[0]
    dtype = at.given[i].dtype
    assert dtype is not None
    plan = in_dtype(at, dtype, Reason(ReasonCode.STORED, f"operand {i} is", (i,)))
    results = tuple(
        s if s.dtype is None else dataclasses.replace(s, is_stored=True) for s in plan.results
    )
    return dataclasses.replace(plan, results=results)


def stored_carries(policy: Policy, at: Place, body: Body, paths: set[str]) -> dict[int, np.dtype]:
    """Returns the dtypes of the carries of a loop that are stored in 16 bits, by their numbers.

    Args:
        policy: The policy.
        at: The loop.
        body: Its body.
        paths: Gets the paths of the carries.
    """
    if not policy.storage:
        return {}
    names, found = argument_paths(body.jaxpr), dict[int, np.dtype]()
    variables = body_of(body.jaxpr).invars
    for k, (i, _) in enumerate(body.carries):
        paths.add(names[i])
        initial = at.given[body.operands[i]]
        if at.declared(variables[i]) != FLOAT32:
            continue
        if initial.is_stored and initial.dtype is not None:
            found[k] = initial.dtype
        elif is_stored(policy.storage, [names[i]]):
            found[k] = np.dtype(policy.compute_dtype)
    return found
