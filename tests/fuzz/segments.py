"""A program with one segment of it in a call, and what a rewritten program computes in which dtype.

A segment is a run of equations. Inline, in a `jit`, in a checkpoint or in a function whose rule is
JAX's own it is the same program: `autocast` has to make the same of it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jmp_autocast.interpreters.compat import (
    Literal,
    bind,
    body_of,
    consts_of,
    equation_context,
    literal_value,
    without_dead_equations,
)
from tests.support.jaxprs import inner_jaxprs, open_jaxpr

from .facts import CONTRACTIONS, MOVEMENT

Function = Callable[..., Any]


def inline(fn: Function) -> Function:
    return fn


def with_rule(fn: Function) -> Function:
    """A function with a derivative rule, which is the one that JAX would have found."""
    function = jax.custom_jvp(fn)
    function.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return function


WRAPPERS: dict[str, Callable[[Function], Function]] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_jvp": with_rule,
}


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of equations of a jaxpr."""

    closed: Any
    start: int
    stop: int

    def takes(self) -> list[Any]:
        """The variables that it reads and does not make."""
        eqns = body_of(self.closed).eqns[self.start : self.stop]
        made = {v for eqn in eqns for v in eqn.outvars}
        read = (v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))
        return list(dict.fromkeys(v for v in read if v not in made))

    def gives(self) -> list[Any]:
        """The variables that it makes and others read."""
        body = body_of(self.closed)
        later = [v for eqn in body.eqns[self.stop :] for v in eqn.invars] + list(body.outvars)
        read = {v for v in later if not isinstance(v, Literal)}
        eqns = body.eqns[self.start : self.stop]
        return [v for eqn in eqns for v in eqn.outvars if v in read]

    def may_be_called(self) -> bool:
        """Whether it reads and makes arrays alone, and has no effect."""
        eqns = body_of(self.closed).eqns[self.start : self.stop]
        variables = [*self.takes(), *self.gives()]
        arrays = all(hasattr(v.aval, "dtype") and hasattr(v.aval, "shape") for v in variables)
        return bool(self.takes() and self.gives()) and arrays and not any(e.effects for e in eqns)

    def call(self, wrap: Callable[[Function], Function]) -> Function:
        """The function of the segment, wrapped: from what it takes to what it gives."""
        eqns = body_of(self.closed).eqns[self.start : self.stop]
        return wrap(lambda *xs: _run(eqns, dict(zip(self.takes(), xs, strict=True)), self.gives()))

    def program(self, call: Function) -> Function:
        """The function of the whole jaxpr in which the segment is ``call``."""
        body = body_of(self.closed)

        def run(*args: Any) -> list[Any]:
            env = dict(zip(body.constvars, consts_of(self.closed), strict=True))
            env.update(zip(body.invars, args, strict=True))
            takes, gives = self.takes(), self.gives()
            _run(body.eqns[: self.start], env, ())
            env.update(zip(gives, call(*[env[v] for v in takes]), strict=True))
            return _run(body.eqns[self.stop :], env, body.outvars)

        return run


def _run(eqns: Any, env: dict[Any, Any], outputs: Any) -> list[Any]:
    read = lambda v: literal_value(v) if isinstance(v, Literal) else env[v]
    for eqn in eqns:
        with equation_context(eqn):
            found = bind(eqn.primitive, [read(v) for v in eqn.invars], eqn.params)
        several = eqn.primitive.multiple_results
        env.update(zip(eqn.outvars, found if several else [found], strict=True))
    return [read(v) for v in outputs]


def without_dead(closed: Any) -> Any:
    """A jaxpr without the equations that no output needs: nobody sees in which dtypes they are."""
    body = body_of(closed)
    live = without_dead_equations(body)
    return live if body is closed else closed.replace(jaxpr=live)


def draw_segment(closed: Any, rng: np.random.Generator) -> Segment | None:
    """A random segment; None if none was found that may stand in a call."""
    count = len(body_of(closed).eqns)
    for _ in range(8 if count else 0):
        start = int(rng.integers(count))
        longest = 8 if rng.random() < 0.7 else count
        segment = Segment(closed, start, int(rng.integers(start, min(count, start + longest))) + 1)
        if segment.may_be_called():
            return segment
    return None


# --- what is compared -----------------------------------------------------------------------

_CALLS = frozenset(
    """
    jit pjit closed_call core_call remat2 checkpoint remat custom_jvp_call custom_vjp_call
    custom_vmap_call scan while cond shard_map
    """.split()
)
# Casts stand at a border, and so may what moves elements.
NO_COMPUTATION = (
    _CALLS
    | MOVEMENT
    | frozenset(
        """
        source_view tangent_carrier row_major stack unstack tile reduce_precision device_put
        optimization_barrier
        """.split()
    )
)
_PRODUCTS = CONTRACTIONS | {"accumulate"}
_RANKS = frozenset(("argmax", "argmin"))

Line = tuple[str, tuple[str, ...], tuple[str, ...]]


def computed_in(jaxpr: Any) -> list[Line]:
    """What a program computes, and in which dtypes: its equations in order, calls taken apart.

    What nobody reads does not count, in whatever call it stands.
    """
    return list(_lines(without_dead_equations(open_jaxpr(jaxpr))))


def _lines(jaxpr: Any) -> Iterator[Line]:
    for eqn in open_jaxpr(jaxpr).eqns:
        name = eqn.primitive.name
        if name in _CALLS:
            for inner in inner_jaxprs(eqn):
                yield from _lines(inner)
        elif name in _PRODUCTS:
            # Whether gradients of its operands are accumulated depends on what they are made of.
            yield "product", _dtypes(eqn.invars[:2]), _dtypes(eqn.outvars)
        elif name == "source_view" and isinstance(eqn.invars[0], Literal):
            yield "pick", (), ()  # of float32: the view of a value that has no source
        elif name not in NO_COMPUTATION:
            results = _dtypes(eqn.outvars)
            # A comparison of 16-bit numbers says the same of their casts; one that ranks float32
            # numbers does not, and few random programs have numbers so close that bits show it.
            compares = name not in _RANKS and not any("float" in dtype for dtype in results)
            yield name, () if compares else _dtypes(eqn.invars), results


def _dtypes(atoms: Any) -> tuple[str, ...]:
    return tuple(str(getattr(v.aval, "dtype", v.aval)) for v in atoms)


def difference(inline: list[Line], called: list[Line]) -> str:
    """The lines in which two programs differ; empty if they are equal.

    Elements that are picked of a float32 value are picked before it is computed where both stand in
    one jaxpr: the bits are the same, and the equations for single elements come in addition.
    """
    if any(name == "pick" for name, _, _ in inline):
        return ""
    show = lambda lines: [f"{n} {' '.join(xs)} -> {' '.join(ys)}" for n, xs, ys in lines]
    diff = difflib.unified_diff(show(inline), show(called), "inline", "called", lineterm="", n=1)
    return "\n".join(diff)
