"""Finds the low-precision copies that enter bodies as inputs, and values that are read often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ..compat import Atom, JaxprEqn, Literal
from ..plan.avals import is_16_bit
from ..plan.copies import CopyKey, Encoding
from ..plan.data import EquationPlan, Inside, Move, Plan
from ..plan.reads import Root, follow, reads_low
from ..primitives.structure import bodies, holds_rules, isolates, runs_again
from ..primitives.traits import having

Copies: TypeAlias = tuple[tuple[int, CopyKey], ...]
"""Pairs (input, key): the position of a source, and the key of a copy that is read."""

_WHOLE = having("whole")
_LOOPS = frozenset(("scan", "while"))

# The largest number of reads whose cotangents may be added in bfloat16: a sum of seven is off by at
# most 7 / 2 units of 2**-9, but a sum of 513 lost a third of the gradient of a normalized weight.
_MAX_COUNT = 7

# Primitives that an inner `autocast` has emitted. They pass the gradient to the source, not to the
# copy, so their reads do not count.
_REWRITTEN = frozenset(("source_view", "accumulate"))


def handed_in(eqn: JaxprEqn, plan: EquationPlan, known: dict[int, Copies]) -> Copies:
    """Returns pairs (operand, key) of the copies that enter the bodies of an equation as inputs.

    A loop then reads a copy that is made before the loop, and a call in the loop gets that copy.
    Elsewhere the body casts the source itself: a copy that is passed to ``jax.checkpoint`` would be
    kept for the backward pass. An extension, such as float8, decides about its encoded copies.

    Args:
        eqn: The equation.
        plan: Its plan.
        known: A cache of the copies of each plan, by the plan's id.
    """
    if holds_rules(eqn):
        return ()
    found: dict[tuple[int, CopyKey], None] = {}
    for body, inner in zip(bodies(eqn), plan.inner, strict=False):
        are_low = reads_low(inner) if isolates(eqn) else []
        for i, key in source_copies(inner, known):
            state = plan.given[body.operands[i]]
            if are_low:
                # If the body reads the source in float32, too, the copy stays outside: otherwise,
                # each device would receive both arrays.
                enters = isinstance(key, np.dtype) and are_low[i]
            elif eqn.primitive.name in _LOOPS:
                # A copy of a loop's constant enters the loop. A copy of a sliced operand enters it
                # only if the tag of the source allows slices of the copy.
                enters = i < body.fixed or (state.tag is not None and state.tag.gives(key))
            else:
                is_taken = not isinstance(key, np.dtype) and key.enters(state.tag, runs_again(eqn))
                enters = state.loop_invariant or is_taken
            if enters:
                found[body.operands[i], key] = None
    return tuple(found)


def source_copies(plan: Plan, known: dict[int, Copies]) -> Copies:
    """Returns pairs (input, key) of the sources that a jaxpr reads in 16 bits or encoded.

    A read of moved elements counts as a read of the input that they come from. If the read is
    encoded, it counts only if all elements are moved, and if the encoding allows moves.

    Args:
        plan: The plan of the jaxpr.
        known: A cache of the copies of each plan, by the plan's id.
    """
    if id(plan) in known:
        return known[id(plan)]
    copies: dict[tuple[int, CopyKey], None] = {}

    def step(i: int, eqn: JaxprEqn, given: list[Root | None]) -> Sequence[Root | None]:
        equation = plan.equations[i]
        by_copy = [k for k, _ in equation.copies]
        operands = enumerate(equation.operands)
        casts = [(k, d) for k, d in operands if is_16_bit(d) and k not in by_copy]
        for k, key in (*equation.copies, *casts, *handed_in(eqn, equation, known)):
            root = given[k]
            if root is not None and (isinstance(key, np.dtype) or _is_whole(root, key)):
                copies[root.input, key] = None
        return _moved(eqn, equation, given)

    # Literals and known values are cast at trace time: they need no operand.
    is_source = [s.dtype is not None and s.keeps_gradient for s in plan.inputs]
    follow(plan.jaxpr, [Root(i) if b else None for i, b in enumerate(is_source)], None, step)
    return known.setdefault(id(plan), tuple(copies))


def _is_whole(root: Root, key: Encoding) -> bool:
    """Returns whether a value has the encoding of its input, as it is or moved."""
    return root.slices is not None and not (root.is_moved and key.when_moved == "anew")


def _moved(
    eqn: JaxprEqn, plan: EquationPlan, given: Sequence[Root | None]
) -> Sequence[Root | None]:
    """Returns, for each result of an equation, the input whose elements it holds, or None."""
    if isinstance(plan.action, Move):
        # The first operand holds the elements. Operands after it are indices.
        tag, root = plan.given[0].tag, given[0]
        is_all = eqn.primitive.name in _WHOLE and not (tag and tag.in_slices)
        return [root and root.moved(is_all)] * len(eqn.outvars)
    if isinstance(plan.action, Inside) and plan.action.inlined:
        (inner,) = plan.inner
        return follow(inner.jaxpr, given, None, lambda i, e, g: _moved(e, inner.equations[i], g))
    return [None] * len(eqn.outvars)


def read_often(plan: Plan) -> frozenset[Any]:
    """Returns the computed values that are read so often that each read is a `source_view`.

    A normalized or merged weight is computed once, and read in each step of an unrolled loop; the
    result of an encoder is read in each step of a decoder. Each `source_view` returns the same
    16-bit array and keeps no residual. Its cotangent is widened before it is added to the others.

    Args:
        plan: The plan of the jaxpr.
    """
    made: dict[Any, Any] = {}
    reads: list[tuple[Atom, np.dtype | None]] = []
    for eqn, equation in zip(plan.jaxpr.eqns, plan.equations, strict=True):
        # Only computed values are counted, so no inputs, literals or moved sources.
        pairs = zip(eqn.outvars, equation.results, strict=True)
        made |= {v: s.dtype for v, s in pairs if s.is_computed}
        if eqn.primitive.name not in _REWRITTEN:
            reads += zip(eqn.invars, equation.operands, strict=True)
    reads += zip(plan.jaxpr.outvars, plan.output_dtypes, strict=True)
    reads = [(v, d or made[v]) for v, d in reads if not isinstance(v, Literal) and v in made]
    counts = Counter(v for v, dtype in reads if is_16_bit(dtype))
    # All float32 consumers of a value share one cast, and count as one read.
    counts.update({v for v, dtype in reads if is_16_bit(made[v]) and not is_16_bit(dtype)})
    return frozenset(v for v, count in counts.items() if count > _MAX_COUNT)
