"""Which equations of a program have an effect on its loss, and where they stand.

A site is an equation that a cotangent reaches: it is computed from a parameter, and makes floats
that are not only moved. Calls, loops, branches, checkpoints and device maps are entered. What has a
derivative rule of its own and a kernel are one site each: what they hold has no cotangent that JAX
would make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from ...interpreters.compat import AnyJaxpr, JaxprEqn, body_of
from ...interpreters.primitives.evaluate import evaluate
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.structure import Body, bodies
from ...interpreters.primitives.traits import BACKWARD, RISKS, having
from ...policies import CALLS, CONTRACTIONS
from ..measure.measured import OUTSIDE, Around, MeasuredEquation, described, is_differentiable
from ..report.jaxprs import flops_of
from .effects_report import Kind

_SAME_VALUES = having("same")
_FLAT = frozenset(name for name, words in BACKWARD.items() if "flat" in words)
# They say nothing of which of two numbers is larger: a rounding does not change their result, or
# they hand on what others have decided.
_NO_DECISION = frozenset("stop_gradient iota is_finite eq ne and or xor not".split()) | frozenset(
    "reduce_and reduce_or shift_left shift_right_arithmetic shift_right_logical".split()
)
_DECIDES = (_FLAT - _NO_DECISION) | {name for name, word in RISKS.items() if word == "routing"}
_ENTERED = CALLS | {"scan", "cond", "shard_map"}


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation, or an argument, whose rounding has an effect.

    Args:
        equation: The equation, as plain data.
        loops: The lengths of the loops around it, outermost first.
        flops: The FLOPs of one run.
    """

    equation: MeasuredEquation
    loops: tuple[int, ...]
    flops: int

    @property
    def kind(self) -> Kind:
        """Whether it is a matmul or a convolution, another operation, or an argument."""
        name = self.equation.primitive
        return "product" if name in CONTRACTIONS else "operation" if name else "parameter"


def parameter_site(path: str, aval: Any) -> Site:
    """Returns an argument as a site, whose rounding has an effect as that of an equation has.

    Args:
        path: Its path in the arguments.
        aval: Its type.
    """
    shapes, dtypes = (tuple(aval.shape),), (aval.dtype.name,)
    return Site(MeasuredEquation(path, "", "", (), False, shapes, dtypes), (), 0)


@dataclasses.dataclass(frozen=True)
class Sites:
    """The sites of a jaxpr.

    Args:
        at: By the position of an equation, the site that it is, or the sites of its bodies.
        live: Whether each output is differentiated.
    """

    at: dict[int, Site | tuple[Sites, ...]]
    live: tuple[bool, ...]

    def each(self) -> Iterator[Site]:
        """Yields the sites in program order: that of the leaves of `tree`."""
        for found in self.at.values():
            if isinstance(found, Site):
                yield found
            else:
                for inner in found:
                    yield from inner.each()

    def tree(self, leaf: Callable[[Site], Any]) -> dict[int, Any]:
        """Returns something for each site, as a pytree of the form of these.

        Args:
            leaf: Returns what stands for a site.
        """
        return {
            i: leaf(found) if isinstance(found, Site) else [inner.tree(leaf) for inner in found]
            for i, found in self.at.items()
        }

    def where(self, wanted: Callable[[Site], bool]) -> Sites:
        """Returns the sites that are wanted, in the same places.

        Args:
            wanted: Whether a site is.
        """
        at: dict[int, Site | tuple[Sites, ...]] = {}
        for i, found in self.at.items():
            if isinstance(found, Site):
                if wanted(found):
                    at[i] = found
                continue
            inner = tuple(each.where(wanted) for each in found)
            if any(each.at for each in inner):
                at[i] = inner
        return Sites(at, self.live)


@dataclasses.dataclass
class Found:
    """What looking for sites has found besides them.

    Args:
        decisions: What ranks or compares values that are differentiated, each with its line.
        closed: What is differentiated, and not looked into.
    """

    decisions: dict[str, None] = dataclasses.field(default_factory=dict)
    closed: dict[str, None] = dataclasses.field(default_factory=dict)


def sites_of(
    jaxpr: AnyJaxpr,
    live: Sequence[bool],
    found: Found,
    around: Around = OUTSIDE,
    constants: bool = False,
) -> Sites:
    """Returns the sites of a jaxpr.

    Args:
        jaxpr: The jaxpr.
        live: Whether each input is differentiated.
        found: What else is found is added here.
        around: What is around the jaxpr.
        constants: Whether its constants are differentiated, too.
    """
    at: dict[int, Site | tuple[Sites, ...]] = {}

    def step(i: int, eqn: JaxprEqn, reads: list[bool]) -> list[bool]:
        if not any(reads):
            return [False] * len(eqn.outvars)
        made, inner = _results(eqn, reads, found, around.at(eqn))
        if inner is not None:
            at[i] = inner
        return made

    consts = [constants and is_differentiable(v.aval) for v in body_of(jaxpr).constvars]
    outputs = evaluate(jaxpr, consts, live, lambda _: False, step, lambda _: nullcontext())
    return Sites(at, tuple(outputs))


def _results(
    eqn: JaxprEqn, reads: Sequence[bool], found: Found, around: Around
) -> tuple[list[bool], Site | tuple[Sites, ...] | None]:
    """Returns which results are differentiated, and the site of an equation, or those inside."""
    name = eqn.primitive.name
    floats = [is_differentiable(v.aval) for v in eqn.outvars]
    if name in _DECIDES or (name == "sort" and len(eqn.outvars) > 1):
        found.decisions.setdefault(f"{name}, {around.source}")
    # No backward pass goes through a `while`: what it makes is used behind a `stop_gradient`.
    if name in _FLAT or name == "while":
        return [False] * len(floats), None
    if name in _ENTERED:
        inner = tuple(_inside(eqn, body, reads, found, around) for body in bodies(eqn))
        made = {
            result
            for body, sites in zip(bodies(eqn), inner, strict=True)
            for result, is_live in zip(body.results, sites.live, strict=True)
            if is_live
        }
        live = [k in made for k in range(len(floats))]
        return live, inner if any(each.at for each in inner) else None
    if name in _SAME_VALUES or eqn.effects or not any(floats):
        return floats, None
    if bodies(eqn) and name != "custom_jvp_call":
        found.closed.setdefault(f"{name}, {around.source}")
    equation = described(eqn, eqn.outvars, around)
    return floats, Site(equation, around.loops, flops_of(contraction_in(eqn) or eqn))


def _inside(
    eqn: JaxprEqn, body: Body, reads: Sequence[bool], found: Found, around: Around
) -> Sites:
    live = [reads[k] for k in body.operands]
    while True:
        sites = sites_of(body.jaxpr, live, found, around.within(eqn, body))
        # What an iteration returns is what the next one takes.
        late = [i for i, k in body.carries if sites.live[k] and not live[i]]
        if not late:
            return sites
        for i in late:
            live[i] = True
