"""Finds the sites of a program: the equations whose rounding changes its results.

A site computes new values from a differentiable value, so that a cotangent reaches its results. The
bodies of calls, loops, branches, checkpoints and `shard_map` have sites of their own. A kernel or a
function with a custom derivative rule is one site for all operations inside it, because JAX creates
no cotangents for the inner values.
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
from ..measure.measured import OUTSIDE, Around, described, is_differentiable, measured_equations

_SAME_VALUES = having("same")
# JAX has no reverse-mode derivative of `while`.
_FLAT = {name for name, words in BACKWARD.items() if "flat" in words} | {"while"}
_ENTERED = CALLS | {"scan", "cond", "shard_map"}


Operation: TypeAlias = tuple[str, str]
"""The names of the enclosing scopes, joined by ``/``, and the name of a primitive."""


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation whose rounding changes the results of the program.

    Args:
        operations: The operation of the equation, and those in its bodies.
        loops: The lengths of the loops around it, outermost first.
    """

    operations: frozenset[Operation]
    loops: tuple[int, ...]


Tree: TypeAlias = dict[int, Any]
"""A value for each site of a jaxpr, by the position of its equation. If the bodies of an equation
have sites, its value is a list of trees, one for each body."""


def sites_of(
    jaxpr: AnyJaxpr, live: Sequence[bool], wanted: Callable[[Site], bool], outer: Around = OUTSIDE
) -> tuple[Tree, list[bool]]:
    """Returns the sites of a jaxpr that pass a test, and whether each output is differentiable.

    Args:
        jaxpr: The jaxpr.
        live: Whether each input is differentiable.
        wanted: A test of a site; only the sites that pass it are returned.
        outer: The scopes and loops around the jaxpr.
    """
    tree: Tree = {}

    def step(i: int, eqn: JaxprEqn, reads: list[bool]) -> list[bool]:
        results = [is_differentiable(v.aval) for v in eqn.outvars]
        name, around = eqn.primitive.name, outer.at(eqn)
        if name in _FLAT or not any(reads):
            return [False] * len(results)
        if name in _ENTERED:
            inner = [in_body(eqn, body, reads, around) for body in bodies(eqn)]
            found = {
                result
                for body, (_, outputs) in zip(bodies(eqn), inner, strict=True)
                for result, is_live in zip(body.results, outputs, strict=True)
                if is_live
            }
            trees = [tree for tree, _ in inner]
            if any(trees):
                tree[i] = trees
            return [k in found for k in range(len(results))]
        if name not in _SAME_VALUES and not eqn.effects and any(results):
            pairs = ((body.jaxpr, around.within(eqn, body)) for body in bodies(eqn))
            inside = itertools.chain.from_iterable(itertools.starmap(measured_equations, pairs))
            equations = (described(eqn, around), *inside)
            operations = frozenset((each.scope, each.primitive) for each in equations)
            if wanted(site := Site(operations, around.loops)):
                tree[i] = site
        return results

    def in_body(
        eqn: JaxprEqn, body: Body, reads: list[bool], around: Around
    ) -> tuple[Tree, list[bool]]:
        live = [reads[k] for k in body.operands]
        while True:
            tree, outputs = sites_of(body.jaxpr, live, wanted, around.within(eqn, body))
            # A carry that becomes differentiable in one iteration is differentiable in the next,
            # so the body is searched again.
            late = [i for i, k in body.carries if outputs[k] and not live[i]]
            if not late:
                return tree, outputs
            for i in late:
                live[i] = True

    consts = [is_differentiable(v.aval) for v in body_of(jaxpr).constvars]
    return tree, evaluate(jaxpr, consts, live, lambda _: False, step, lambda _: nullcontext())
