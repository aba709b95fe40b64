"""What was planned, for reports: each kept array and why, each segment and what it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..compat import source_line
from ..primitives.held_contraction import contraction_in
from .cut import Cut, is_statistic
from .emit import Planned
from .graph import Graph, Role, Step, StepKind, Value, assumed_elements
from .segments import Unit


@dataclasses.dataclass(frozen=True)
class KeptArray:
    """An array that a planned jaxpr keeps for its backward pass.

    Args:
        dtype: Its dtype.
        shape: Its shape, in one iteration of the loops around it.
        times: How often it is kept: the iterations of the loops around it.
        nbytes: Its bytes, all iterations together.
        primitive: The primitive that makes it, ``""`` for an input of a loop's body.
        scope: The names of the scopes around that.
        source: Its source line.
        readers: The primitives that read it in the backward pass.
        reason: Why it is kept.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast.inspect import explain_kept
        >>> def loss(params, x):
        ...     return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, params["w"])[0].sum()
        >>> report = explain_kept(loss, {"w": jnp.ones((3, 8, 8))}, jnp.ones((4, 8)))
        >>> report.arrays[-1].primitive, report.arrays[-1].reason
        ('dot_general', 'a contraction is never done again')
    """

    dtype: str
    shape: tuple[int, ...]
    times: int
    nbytes: int
    primitive: str
    scope: str
    source: str
    readers: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class Island:
    """A segment: steps that become one `jax.checkpoint`.

    Args:
        scope: The names of the scopes around its first step.
        times: How often it runs.
        recomputed: The primitives whose results are made again, in program order.
        nbytes: The bytes of those results, all iterations together: what is not kept.
        flops: What making them again costs: an operation for each element.
        contractions: The matmuls and convolutions in it, which are not done again.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast.inspect import explain_kept
        >>> def loss(params, x):
        ...     layer = lambda x, w: (jax.nn.silu(x @ w), None)
        ...     return jax.lax.scan(layer, x, params["w"])[0].sum()
        >>> report = explain_kept(loss, {"w": jnp.ones((3, 8, 8))}, jnp.ones((4, 8)))
        >>> report.islands[0].recomputed, report.islands[0].nbytes
        (('logistic',), 384)
    """

    scope: str
    times: int
    recomputed: tuple[str, ...]
    nbytes: int
    flops: int
    contractions: int


@dataclasses.dataclass(frozen=True)
class CutValue:
    """A value of a planned jaxpr, and what becomes of it between the two passes.

    Args:
        primitive: The primitive that makes it, ``""`` for an input of a loop's body.
        dtype: Its dtype.
        shape: Its shape, in one iteration of the loops around it.
        nbytes: Its bytes, in one iteration.
        fate: ``"kept"``, ``"computed again"``, or ``"not read"`` where no derivative needs it.
        scope: The names of the scopes around it.
        source: Its source line.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast.inspect import explain_kept
        >>> def loss(params, x):
        ...     layer = lambda x, w: (jax.nn.silu(x @ w), None)
        ...     return jax.lax.scan(layer, x, params["w"])[0].sum()
        >>> (cut,) = explain_kept(loss, {"w": jnp.ones((3, 8, 8))}, jnp.ones((4, 8))).cuts
        >>> [(value.primitive, value.fate) for value in cut.values]
        [('', 'kept'), ('dot_general', 'kept'), ('logistic', 'computed again'), ('mul', 'not read')]
    """

    primitive: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    fate: str
    scope: str
    source: str


@dataclasses.dataclass(frozen=True)
class CutJaxpr:
    """A planned jaxpr, value by value: where the cut goes through it.

    Args:
        scope: The names of the scopes around it.
        times: How often it runs.
        values: Its values in program order. What is in memory anyway, such as a weight, is left
            out.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast.inspect import explain_kept
        >>> def loss(params, x):
        ...     return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, params["w"])[0].sum()
        >>> (cut,) = explain_kept(loss, {"w": jnp.ones((3, 8, 8))}, jnp.ones((4, 8))).cuts
        >>> cut.times
        3
    """

    scope: str
    times: int
    values: tuple[CutValue, ...]


def cut_jaxprs(planned: Sequence[Planned]) -> list[CutJaxpr]:
    """Returns the planned jaxprs, that which keeps the most first."""
    by_size = sorted(planned, key=lambda each: -each.cut.nbytes * each.times)
    return [CutJaxpr("/".join(p.scope), p.times, tuple(_cut_values(p))) for p in by_size]


def _cut_values(planned: Planned) -> Iterator[CutValue]:
    cut = planned.cut
    for v in planned.graph.values:
        if v.role is Role.FRESH and v.nbytes:
            again = "computed again" if v in cut.recomputed else "not read"
            fate = "kept" if v in cut.kept else again
            yield CutValue(**_array(v, planned), nbytes=v.nbytes, fate=fate)


def kept_arrays(planned: Sequence[Planned]) -> list[KeptArray]:
    """Returns the arrays that are kept, the largest first."""
    found = [array for each in planned for array in _kept_arrays(each)]
    return sorted(found, key=lambda array: -array.nbytes)


def islands(planned: Sequence[Planned]) -> list[Island]:
    """Returns the segments in which something is made again, in program order."""
    found = [_island(unit, each) for each in planned for unit in each.units if unit.is_segment]
    return [island for island in found if island.recomputed]


def _kept_arrays(planned: Planned) -> Iterator[KeptArray]:
    readers: dict[Value, dict[str, None]] = {}
    for step in planned.graph.steps:
        again = not planned.cut.recomputed.isdisjoint(step.results)
        for v in step.values if again else step.reads:
            readers.setdefault(v, {})[_primitive(step)] = None
    for v in planned.graph.values:
        if v in planned.cut.kept and v.role is Role.FRESH and v.nbytes:
            yield KeptArray(
                **_array(v, planned),
                times=planned.times,
                nbytes=v.nbytes * planned.times,
                readers=tuple(readers.get(v, ())),
                reason=_reason(v, planned.graph, planned.cut),
            )


def _array(v: Value, planned: Planned) -> dict[str, Any]:
    """Returns what reports say of each array: its type, and where it is made."""
    step = v.producer
    return {
        "dtype": str(v.aval.dtype),
        "shape": tuple(v.aval.shape),
        "primitive": _primitive(step) if step else "",
        "scope": _path(planned, step),
        "source": source_line(step.eqn) if step else "",
    }


def _primitive(step: Step) -> str:
    """Returns the primitive's name: of a product that autocast makes, that of its contraction."""
    return (contraction_in(step.eqn) or step.eqn).primitive.name


def _reason(v: Value, graph: Graph, cut: Cut) -> str:
    step = v.producer
    if step is None:
        return "it enters the body of a loop"
    if step.kind is StepKind.CONTRACTION:
        return "a contraction is never done again"
    if step.kind is StepKind.OPAQUE:
        return f"{step.eqn.primitive.name} is never done again"
    if is_statistic(step):
        return "a small statistic"
    if v in cut.fixed:
        return "read again behind a contraction"
    opaque = [s for s in graph.steps if s.kind is StepKind.OPAQUE and v in s.reads]
    if opaque:
        return f"{opaque[0].eqn.primitive.name} keeps what it reads"
    return "fewer bytes than what it is made of"


def _island(unit: Unit, planned: Planned) -> Island:
    again = [step for step in unit.steps if not planned.cut.recomputed.isdisjoint(step.results)]
    results = [v for step in again for v in step.results if v in planned.cut.recomputed]
    return Island(
        _path(planned, unit.steps[0]),
        planned.times,
        tuple(step.eqn.primitive.name for step in again),
        planned.times * sum(v.nbytes for v in results),
        planned.times * sum(assumed_elements(v.aval) for v in results),
        sum(step.kind is StepKind.CONTRACTION for step in unit.steps),
    )


def _path(planned: Planned, step: Step | None) -> str:
    return "/".join((*planned.scope, *(step.scope if step else ())))
