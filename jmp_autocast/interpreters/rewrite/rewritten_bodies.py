"""The rewritten bodies of an equation: the order of rewriting, and a cache.

**Order.** A body is rewritten while JAX traces the one around it, which takes some 19 frames of
Python a level. Deeply nested calls are rewritten innermost first, so that each finds the results
for the calls inside it.

**Cache.** Outside ``jit`` JAX compiles a call, or a loop, once for each jaxpr, by its identity. It
traces `jax.nn.relu` once, and would compile the rewritten jaxpr at each call of `autocast`: 60 to
670 ms. So the rewritten jaxpr for one plan is cached across calls.
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

# Deeper than any model; 1,000 frames of Python are 50 levels.
_DEEP = 16


def rewritten_bodies(
    rewriter: Any, eqn: JaxprEqn, plan: EquationPlan, arrays: Sequence[Any] | None = None
) -> list[tuple[Any, Copies]]:
    """Returns the rewritten jaxpr of each body of an equation, and the copies that it takes.

    Args:
        rewriter: The `Rewriter`, whose file imports this one.
        eqn: The equation.
        plan: Its plan.
        arrays: The operands, where the equation is bound now.

    Returns:
        For each body its jaxpr and pairs (input, key).
    """
    copied = handed_in(eqn, plan, rewriter.known_copies)
    # With a label, even unchanged equations get a scope.
    is_watched = rewriter.looks_at(eqn) or rewriter.label is not None
    is_entered = is_watched or runs_again(eqn)
    is_run = arrays is not None and not any(map(is_staged, arrays))
    is_kept = is_run and not (is_watched or rewriter.planned or eqn.effects or is_checked())
    found = []
    for inner, body in zip(plan.inner, bodies(eqn), strict=True):
        # Bodies that share their operands (branches) all take the same copies; the bodies of a
        # ``while`` take those of their own constants.
        own = body.operands
        pairs = tuple([(own.index(i), key) for i, key in copied if i in own])
        if inner.identity and not (pairs or is_entered):
            # A body without changes stays the jaxpr that JAX has in its caches.
            jaxpr = body.jaxpr
        elif is_kept and (key := rewriter.planner.key) is not None:
            jaxpr = _kept(_question(rewriter, inner, body, pairs, key))
        else:
            jaxpr = rewriter.jaxpr(inner, body.jaxpr, pairs, body.takes_copies_at)
        found.append((jaxpr, pairs))
    return found


def make_innermost_first(rewriter: Any, plan: Plan) -> None:
    """Makes the jaxprs of a program whose calls are nested deeply.

    Args:
        rewriter: The `Rewriter`, which makes and remembers them.
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
    """Returns a function that rewrites a body, keyed by everything that its result depends on."""
    at, closed = body.takes_copies_at, body.jaxpr  # alive as long as its id is in a key
    asked = id(closed), plan.inputs, plan.requests, plan.path, copies, at
    # A new rewriter and planner: those of the call would keep its program and arrays alive.
    like, anew = type(rewriter), rewriter.planner.anew
    key = (*asked, of_planner, trace_context(), registered_rules())
    return Keyed(key, lambda: like(anew()).jaxpr(plan, closed, copies, at))


@functools.lru_cache(maxsize=512)
def _kept(asked: Keyed) -> Any:
    return asked.of()
