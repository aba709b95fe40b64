"""The rewritten bodies of an equation: their order and their cache.

**Order.** A body is rewritten while JAX traces the body around it, which takes some 19 Python
frames per level. So deeply nested calls are rewritten innermost first, and each finds the results
for the calls inside it.

**Cache.** Outside of ``jit``, JAX compiles a call or a loop once for each jaxpr object. It traces
`jax.nn.relu` only once, but would compile a new rewritten jaxpr at each call of `autocast`, in 60
to 670 ms. So the rewritten jaxpr of a plan is cached across calls.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

from ...policies.registry import registered_rules
from ..after.copies import Copies, handed_in
from ..compat import JaxprEqn, is_checked, is_staged, trace_context
from ..compat.keyed import Keyed
from ..plan.data import EquationPlan, Plan
from ..primitives.structure import STRUCTURES, Body, bodies, innermost_first, runs_again

# No known model nests calls this deeply. At 50 levels, Python's limit of 1,000 frames is reached.
_DEEP = 16


def rewritten_bodies(
    rewriter: Any, eqn: JaxprEqn, plan: EquationPlan, arrays: Sequence[Any] | None = None
) -> list[tuple[Any, Copies]]:
    """Returns the rewritten jaxpr of each body of an equation, and the copies that it takes.

    Args:
        rewriter: The `Rewriter`, whose module imports this one.
        eqn: The equation.
        plan: Its plan.
        arrays: The operands, if the equation is bound now.

    Returns:
        For each body, its jaxpr and its copies, as pairs (input, key). The key of a copy is a dtype
        or an encoding such as float8.
    """
    copied = handed_in(eqn, plan, rewriter.known_copies)
    # With a label, even an unchanged body is rewritten, because its equations get a scope.
    is_watched = rewriter.looks_at(eqn) or rewriter.label is not None
    is_entered = is_watched or runs_again(eqn)
    is_run = arrays is not None and not any(map(is_staged, arrays))
    is_kept = is_run and not (is_watched or rewriter.planned or eqn.effects or is_checked())
    found = []
    for inner, body in zip(plan.inner, bodies(eqn), strict=True):
        # Branches share their operands, so the same copies enter all branches. Each body of a
        # ``while`` has constants of its own, and gets the copies of those alone.
        own = body.operands
        pairs = tuple([(own.index(i), key) for i, key in copied if i in own])
        if inner.identity and not (pairs or is_entered):
            # An unchanged body stays the jaxpr object that JAX has in its caches.
            jaxpr = body.jaxpr
        elif is_kept and (key := rewriter.planner.key) is not None:
            jaxpr = _kept(_question(rewriter, inner, body, pairs, key))
        else:
            jaxpr = rewriter.jaxpr(inner, body.jaxpr, pairs, body.takes_copies_at)
        found.append((jaxpr, pairs))
    return found


def make_innermost_first(rewriter: Any, plan: Plan) -> None:
    """Makes the rewritten jaxprs of a program, if its calls are deeply nested.

    Args:
        rewriter: The `Rewriter`, which makes and caches them.
        plan: The plan of the program.
    """
    nested = innermost_first(plan, lambda p: [q for x in p.equations for q in x.inner])
    if nested[-1][1] <= _DEEP:
        return
    for inner, _ in nested[:-1]:
        for eqn, equation in zip(inner.jaxpr.eqns, inner.equations, strict=True):
            if equation.inner and STRUCTURES[eqn.primitive.name].rebind is not None:
                rewritten_bodies(rewriter, eqn, equation)


def _question(rewriter: Any, plan: Plan, body: Body, copies: Copies, of_planner: Hashable) -> Keyed:
    """Returns a function that rewrites a body, with a key of all that its result depends on."""
    at, closed = body.takes_copies_at, body.jaxpr  # the jaxpr lives while its id is in a key
    asked = id(closed), plan.inputs, plan.requests, plan.path, copies, at
    # The function makes a new rewriter, because the current one would keep its program alive.
    like, anew = type(rewriter), rewriter.planner.anew
    key = (*asked, of_planner, trace_context(), registered_rules())
    return Keyed(key, lambda: like(anew()).jaxpr(plan, closed, copies, at))


@functools.lru_cache(maxsize=512)
def _kept(asked: Keyed) -> Any:
    return asked.of()
