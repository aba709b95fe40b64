"""The equations whose rounding has an effect on a program's results.

A site is an equation that a cotangent reaches: its results depend on a differentiable value, and it
computes new values. The bodies of calls, loops, branches, checkpoints and device maps are entered.
A kernel, and a function with a derivative rule of its own, is one site for all operations inside,
because JAX creates no cotangents for these.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

from ...interpreters.compat import AnyJaxpr, JaxprEqn, body_of
from ...interpreters.primitives.evaluate import evaluate
from ...interpreters.primitives.structure import Body, bodies
from ...interpreters.primitives.traits import BACKWARD, having
from ...policies import CALLS
from ..measure import measured
from ..measure.measured import OUTSIDE, Around, is_differentiable

_SAME_VALUES = having("same")
# JAX does not differentiate a `while` backward.
_FLAT = {name for name, words in BACKWARD.items() if "flat" in words} | {"while"}
_ENTERED = CALLS | {"scan", "cond", "shard_map"}


Operation: TypeAlias = tuple[str, str]
"""The names of the enclosing scopes, joined by ``/``, and the name of a primitive."""


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation whose rounding has an effect.

    Args:
        operations: Its operation, or those inside.
        loops: The lengths of the loops around it, outermost first.
    """

    operations: frozenset[Operation]
    loops: tuple[int, ...]


Tree: TypeAlias = dict[int, Any]
"""A value for each site of a jaxpr, by the position of its equation; a list of trees, one for each
body, for an equation that is entered."""


def sites_of(
    jaxpr: AnyJaxpr,
    live: Sequence[bool],
    wanted: Callable[[Site], bool],
    around: Around = OUTSIDE,
) -> tuple[Tree, list[bool]]:
    """Returns the wanted sites of a jaxpr, and which outputs are differentiable.

    Args:
        jaxpr: The jaxpr.
        live: Which inputs are differentiable.
        wanted: Whether a site is wanted.
        around: The scopes and loops around the jaxpr.
    """
    tree: Tree = {}

    def step(i: int, eqn: JaxprEqn, reads: list[bool]) -> list[bool]:
        if not any(reads):
            return [False] * len(eqn.outvars)
        live, found = _sites_in(eqn, reads, wanted, around.at(eqn))
        if found:
            tree[i] = found
        return live

    consts = [is_differentiable(v.aval) for v in body_of(jaxpr).constvars]
    return tree, evaluate(jaxpr, consts, live, lambda _: False, step, lambda _: nullcontext())


def _sites_in(
    eqn: JaxprEqn, reads: Sequence[bool], wanted: Callable[[Site], bool], around: Around
) -> tuple[list[bool], Any]:
    """Returns which results are differentiable, and the site, the trees of bodies or None."""
    name = eqn.primitive.name
    floats = [is_differentiable(v.aval) for v in eqn.outvars]
    if name in _FLAT:
        return [False] * len(floats), None
    if name in _ENTERED:
        inner = [_in_body(eqn, body, reads, wanted, around) for body in bodies(eqn)]
        live = {
            result
            for body, (_, outputs) in zip(bodies(eqn), inner, strict=True)
            for result, is_live in zip(body.results, outputs, strict=True)
            if is_live
        }
        trees = [tree for tree, _ in inner]
        return [k in live for k in range(len(floats))], trees if any(trees) else None
    if name in _SAME_VALUES or eqn.effects or not any(floats):
        return floats, None
    inside = (measured.measured_equations(b.jaxpr, around.within(eqn, b)) for b in bodies(eqn))
    own = measured.described(eqn, eqn.outvars, around)
    found = (own, *itertools.chain.from_iterable(inside))
    site = Site(frozenset((each.scope, each.primitive) for each in found), around.loops)
    return floats, site if wanted(site) else None


def _in_body(
    eqn: JaxprEqn,
    body: Body,
    reads: Sequence[bool],
    wanted: Callable[[Site], bool],
    around: Around,
) -> tuple[Tree, list[bool]]:
    live = [reads[k] for k in body.operands]
    while True:
        tree, outputs = sites_of(body.jaxpr, live, wanted, around.within(eqn, body))
        # An iteration's carries are operands of the next one.
        late = [i for i, k in body.carries if outputs[k] and not live[i]]
        if not late:
            return tree, outputs
        for i in late:
            live[i] = True
