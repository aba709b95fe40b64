"""Which equations have an effect on a program's results, and where they stand.

A site is an equation that a cotangent reaches: its results depend on a differentiable value, and
are more than moved operands. The bodies of calls, loops, branches, checkpoints and device maps are
entered. A kernel, and a function with a derivative rule of its own, is one site, which stands for
all operations inside: JAX makes no cotangents for these.
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
from ..measure.measured import (
    OUTSIDE,
    Around,
    described,
    is_differentiable,
    measured_equations,
)

_SAME_VALUES = having("same")
_FLAT = frozenset(name for name, words in BACKWARD.items() if "flat" in words)
_ENTERED = CALLS | {"scan", "cond", "shard_map"}


Operation: TypeAlias = tuple[str, str]
"""The names of the enclosing scopes, joined by ``/``, and the name of a primitive."""


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation whose rounding has an effect.

    Args:
        operations: The operation that it is, or those inside.
        loops: The lengths of the loops around it, outermost first.
    """

    operations: frozenset[Operation]
    loops: tuple[int, ...]


Tree: TypeAlias = dict[int, Any]
"""Something for each site of a jaxpr, by the position of its equation; a list of trees, one for
each body, for an equation that is entered."""


def sites_of(
    jaxpr: AnyJaxpr, live: Sequence[bool], wanted: Callable[[Site], bool]
) -> tuple[Tree, list[bool]]:
    """Returns the wanted sites of a jaxpr, and which outputs are differentiable.

    Args:
        jaxpr: The jaxpr.
        live: Which inputs are differentiable.
        wanted: Whether a site is wanted.
    """
    return _Sites(wanted).of(jaxpr, live, OUTSIDE)


class _Sites:
    def __init__(self, wanted: Callable[[Site], bool]) -> None:
        self._wanted = wanted

    def of(self, jaxpr: AnyJaxpr, live: Sequence[bool], around: Around) -> tuple[Tree, list[bool]]:
        """Returns the sites of a jaxpr, and which of its outputs are differentiable."""
        tree: Tree = {}

        def step(i: int, eqn: JaxprEqn, reads: list[bool]) -> list[bool]:
            if not any(reads):
                return [False] * len(eqn.outvars)
            live, found = self._equation(eqn, reads, around.at(eqn))
            if found:
                tree[i] = found
            return live

        consts = [is_differentiable(v.aval) for v in body_of(jaxpr).constvars]
        return tree, evaluate(jaxpr, consts, live, lambda _: False, step, lambda _: nullcontext())

    def _equation(
        self, eqn: JaxprEqn, reads: Sequence[bool], around: Around
    ) -> tuple[list[bool], Any]:
        """Returns which results are differentiable, and the site, the trees of bodies or None."""
        name = eqn.primitive.name
        floats = [is_differentiable(v.aval) for v in eqn.outvars]
        # JAX does not differentiate a `while` backward.
        if name in _FLAT or name == "while":
            return [False] * len(floats), None
        if name in _ENTERED:
            inner = [self._inside(eqn, body, reads, around) for body in bodies(eqn)]
            made = {
                result
                for body, (_, outputs) in zip(bodies(eqn), inner, strict=True)
                for result, is_live in zip(body.results, outputs, strict=True)
                if is_live
            }
            trees = [tree for tree, _ in inner]
            return [k in made for k in range(len(floats))], trees if any(trees) else None
        if name in _SAME_VALUES or eqn.effects or not any(floats):
            return floats, None
        inside = (measured_equations(b.jaxpr, around.within(eqn, b)) for b in bodies(eqn))
        found = [described(eqn, eqn.outvars, around), *itertools.chain.from_iterable(inside)]
        site = Site(frozenset((each.scope, each.primitive) for each in found), around.loops)
        return floats, site if self._wanted(site) else None

    def _inside(
        self, eqn: JaxprEqn, body: Body, reads: Sequence[bool], around: Around
    ) -> tuple[Tree, list[bool]]:
        live = [reads[k] for k in body.operands]
        while True:
            tree, outputs = self.of(body.jaxpr, live, around.within(eqn, body))
            # An iteration's carries are operands of the next one.
            late = [i for i, k in body.carries if outputs[k] and not live[i]]
            if not late:
                return tree, outputs
            for i in late:
                live[i] = True
