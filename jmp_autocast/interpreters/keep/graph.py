"""A jaxpr as a graph of values and steps, with the values that each derivative reads.

An *opaque* step is never recomputed, and JAX keeps the values that its derivative reads.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..compat import (
    AnyJaxpr,
    Atom,
    JaxprEqn,
    Literal,
    Tracer,
    assumed_size,
    bind,
    body_of,
    consts_of,
    fresh_make_jaxpr,
    is_ref,
    scope_names,
)
from ..primitives.evaluate import of_positions
from ..primitives.reading import cast_dtype, reduction_depth
from ..primitives.structure import called, is_plain_call
from ..primitives.traits import BACKWARD

_OPAQUE: frozenset[str] = frozenset()


class Role(enum.Enum):
    """How an input of a jaxpr is stored: in memory anyway, or only if it is kept."""

    PARAM = "param"
    """A parameter. It is in memory anyway, and its moves and casts are, too."""
    SLICE = "slice"
    """The slice of a stacked parameter that a loop reads in one iteration. It is in memory anyway.
    """
    STORED = "stored"
    """In memory anyway: an input of the program, or a loop operand that is not a carry."""
    FRESH = "fresh"
    """In memory only if it is kept: a carry of a loop, or a computed value."""


class StepKind(enum.Enum):
    """How the plan treats a step."""

    LEAF = "leaf"
    """A move or cast of parameters and constants, computed once: its result stays in memory."""
    FLOATING = "floating"
    """A cheap step on stored values. Each consumer computes it again."""
    CHEAP = "cheap"
    CONTRACTION = "contraction"
    OPAQUE = "opaque"


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value of a jaxpr.

    Args:
        aval: Its abstract value.
        role: The role of an input. The role of a result is `Role.PARAM` for a leaf, else
            `Role.FRESH`.
        producer: The step that computes it, or None for an input or a constant.
        active: Whether it may have a derivative.
        level: The largest number of contractions and opaque steps on a path from an input to it.
        const: The array of a constant.
    """

    aval: Any
    role: Role = Role.FRESH
    producer: Step | None = None
    active: bool = False
    level: int = 0
    const: Any = None

    @property
    def nbytes(self) -> int:
        """Its bytes; 0 for a value without a plain dtype, such as a PRNG key."""
        dtype = getattr(self.aval, "dtype", None)
        if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
            return 0
        return assumed_elements(self.aval) * dtype.itemsize

    @property
    def is_stored(self) -> bool:
        """Whether it is in memory anyway, or cheap to compute from values in memory."""
        if self.producer is None:
            return self.role is not Role.FRESH
        return self.producer.kind in (StepKind.LEAF, StepKind.FLOATING)


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """An equation of the program. Calls are inlined and are no steps.

    Args:
        eqn: The equation.
        around: The equations of the inlined calls around it, outermost first.
        operands: Its operands, each a `Value` or a literal of the jaxpr.
        index: Its place in program order.
        kind: How the plan treats it.
        reads: The values that its derivative reads.
        level: The highest level of its operands.
        results: Its results.
        values: Its operands without the literals.
        rule: The jaxpr of its derivative, if the equation is a ``custom_jvp`` function with a cheap
            rule.
    """

    eqn: JaxprEqn
    around: tuple[Any, ...]
    operands: list[Any]
    index: int
    kind: StepKind = StepKind.OPAQUE
    reads: list[Value] = dataclasses.field(default_factory=list)
    level: int = 0
    results: list[Value] = dataclasses.field(default_factory=list)
    values: list[Value] = dataclasses.field(init=False)
    rule: Any = None

    def __post_init__(self) -> None:
        self.values = [x for x in self.operands if isinstance(x, Value)]

    @property
    def words(self) -> frozenset[str]:
        """The traits of its primitive."""
        words = BACKWARD.get(self.eqn.primitive.name, _OPAQUE)
        # An einsum that sums over nothing is a multiplication: MaxText's norms scale by such an
        # einsum.
        multiplies = "contracts" in words and reduction_depth(self.eqn) == 1
        return BACKWARD["mul"] if multiplies else words


@dataclasses.dataclass(slots=True)
class Graph:
    """A jaxpr as values and steps, with its calls inlined.

    Args:
        inputs: Its inputs.
        consts: Its constants and those of inlined calls.
        steps: Its steps, in program order.
        outputs: Its outputs, each a `Value` or a literal of the jaxpr.
    """

    inputs: list[Value]
    consts: list[Value]
    steps: list[Step] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)

    @property
    def values(self) -> list[Value]:
        """All values, without duplicates."""
        return [*self.inputs, *self.consts, *(v for step in self.steps for v in step.results)]


def has_order(eqn: JaxprEqn) -> bool:
    """Returns whether an equation must stay in order, because of effects or a ref."""
    return bool(eqn.effects) or any(is_ref(v.aval) for v in (*eqn.invars, *eqn.outvars))


def assumed_elements(aval: Any) -> int:
    """Returns the number of elements of an array; 1 for a value without a shape."""
    return assumed_size(math.prod(getattr(aval, "shape", ())))


def graph_of(
    jaxpr: AnyJaxpr, roles: Sequence[Role], excludes: Callable[[tuple[str, ...]], bool]
) -> Graph:
    """Returns the graph of a jaxpr.

    Args:
        jaxpr: The jaxpr, open or closed.
        roles: The role of each input in the backward pass.
        excludes: Returns whether nothing in a scope may be recomputed.
    """
    body = body_of(jaxpr)
    inputs = [
        Value(v.aval, role, active=_is_float(v.aval))
        for v, role in zip(body.invars, roles, strict=True)
    ]
    graph = Graph(inputs, [])
    graph.outputs = _flatten(graph, jaxpr, inputs, (), excludes)
    return graph


def _flatten(
    graph: Graph,
    jaxpr: AnyJaxpr,
    inputs: Sequence[Any],
    around: tuple[Any, ...],
    excludes: Callable[[tuple[str, ...]], bool],
) -> list[Any]:
    """Appends the steps of a jaxpr to a graph; returns its outputs, each a `Value` or a literal."""
    body = body_of(jaxpr)
    env: dict[Any, Any] = dict(zip(body.invars, inputs, strict=True))
    for v, const in zip(body.constvars, consts_of(jaxpr), strict=True):
        # Among constants, only a tracer of an outer transformation may have a derivative.
        active = isinstance(const, Tracer) and _is_float(v.aval)
        env[v] = Value(v.aval, Role.PARAM, active=active, const=const)
        graph.consts.append(env[v])

    def read(atom: Atom) -> Any:
        return atom if isinstance(atom, Literal) else env[atom]

    # Steps with effects keep their order: each is on the level of the one before it, or higher. A
    # call with effects is not inlined, because its equations could be on different levels.
    effects = 0
    for eqn in body.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if is_plain_call(eqn) and not has_order(eqn):
            results = _flatten(graph, called(eqn), operands, (*around, eqn), excludes)
        else:
            step = Step(eqn, around, operands, len(graph.steps))
            step.level = max((v.level for v in step.values), default=0)
            step.kind = _kind(step)
            scope = tuple(name for e in (*around, eqn) for name in scope_names(e))
            if step.kind is not StepKind.LEAF and excludes(scope):
                step.kind = StepKind.OPAQUE
            step.reads = _reads(step)
            if has_order(eqn):
                effects = step.level = max(step.level, effects)
            step.results = _results(step)
            graph.steps.append(step)
            results = step.results
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]


def _kind(step: Step) -> StepKind:
    eqn, words = step.eqn, step.words
    if has_order(eqn):
        return StepKind.OPAQUE
    if "contracts" in words:
        return StepKind.CONTRACTION
    # Complex values are not saved, because `jax.checkpoint` applies `reduce_precision` to saved
    # values, and `reduce_precision` rejects complex numbers.
    if any(_is_float(v.aval, jnp.complexfloating) for v in (*step.values, *eqn.outvars)):
        return StepKind.OPAQUE
    if "cheap" not in words:
        step.rule = _cheap_rule(eqn)
        if step.rule is None:
            return StepKind.OPAQUE
    if not all(v.is_stored for v in step.values):
        return StepKind.CHEAP
    # A cast or transpose of a parameter is no larger than the parameter, so it is computed once. A
    # result that is larger than its operands (a scale broadcast to a batch, a mask from an iota) is
    # recomputed for each consumer.
    made = sum(assumed_elements(v.aval) for v in eqn.outvars)
    given = sum(assumed_elements(v.aval) for v in step.values)
    from_params = all(v.role in (Role.PARAM, Role.SLICE) for v in step.values)
    # The casts of a parameter's slices in all iterations would together be as large as a copy of
    # all layers, so the backward loop casts each slice again. A Llama with the widths of the 7B
    # model then needs 0.87 times the temporary bytes at 1.02 times the traffic (MaxText, 2 layers
    # on 4 TPUs v5e), and a GPT 0.98 and 0.99 times.
    is_slice = any(v.role is Role.SLICE for v in step.values)
    once = from_params and made <= given and not (is_slice and cast_dtype(eqn) is not None)
    return StepKind.LEAF if once else StepKind.FLOATING


def _results(step: Step) -> list[Value]:
    raised = step.kind in (StepKind.CONTRACTION, StepKind.OPAQUE)
    role = Role.PARAM if step.kind is StepKind.LEAF else Role.FRESH
    moving = any(v.active for v in step.values) and "flat" not in step.words
    return [
        Value(v.aval, role, step, moving and _is_float(v.aval), step.level + raised)
        for v in step.eqn.outvars
    ]


def _reads(step: Step) -> list[Value]:
    """Returns the values that the derivative of a step reads."""
    words, operands = step.words, step.operands
    is_active = [isinstance(x, Value) and x.active for x in operands]
    if not any(is_active) or "flat" in words:
        return []
    if not any(_is_float(v.aval) for v in step.eqn.outvars):
        return []
    others = [x for x in step.values if not _is_float(x.aval)]
    if "linear" in words:
        return others
    if "bilinear" in words:
        pairs = ((operands[0], is_active[1]), (operands[1], is_active[0]))
        return [x for x, needed in pairs if needed and isinstance(x, Value)] + others
    if "linear0" in words and not is_active[1]:
        return [x for x in operands[1:] if isinstance(x, Value)]
    return step.values


def _is_float(aval: Any, kind: Any = jnp.inexact) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, kind)


# --- custom_jvp functions --------------------------------------------------------------------


def _cheap_rule(eqn: JaxprEqn) -> Any:
    """Returns the jaxpr of the derivative of a ``custom_jvp`` function, or None if it is not cheap.

    The derivative is cheap if the function and its rule hold only cheap steps, as in `jax.nn.relu`.
    """
    if eqn.primitive.name != "custom_jvp_call" or not _is_cheap(called(eqn)):
        return None
    avals = [v.aval for v in eqn.invars]
    moving = [i for i, aval in enumerate(avals) if _is_float(aval)]

    def derivative(xs: Sequence[Any], tangents: Sequence[Any]) -> Any:
        function = of_positions(lambda *ys: bind(eqn.primitive, ys, eqn.params), xs, moving)
        return jax.jvp(function, [xs[i] for i in moving], tangents)

    try:
        jaxpr = fresh_make_jaxpr(derivative, avals, [avals[i] for i in moving])
    except Exception:  # a user's rule may raise any error, and JAX raises it again
        return None
    return jaxpr if _is_cheap(jaxpr) else None


def _is_cheap(jaxpr: AnyJaxpr) -> bool:
    # An inner ``custom_jvp`` function is cheap if its body is: the derivative runs that body and
    # never differentiates it.
    return all(
        _is_cheap(called(eqn))
        if is_plain_call(eqn) or eqn.primitive.name == "custom_jvp_call"
        else "cheap" in BACKWARD.get(eqn.primitive.name, _OPAQUE) and not eqn.effects
        for eqn in body_of(jaxpr).eqns
    )
