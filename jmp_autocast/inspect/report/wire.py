"""What goes over the wire: the collectives that a program itself holds, by dtype and bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from ...interpreters.after.walk import Origin, Visit, behind
from ...interpreters.compat import (
    AnyJaxpr,
    JaxprEqn,
    aval_of,
    body_of,
    collective_axes,
    devices_along,
    without_dead_equations,
)
from ...interpreters.plan.data import Contract
from ...interpreters.primitives.finalise import finalise
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.structure import equations_in
from ...policies import COMPUTE_DTYPES, DATA_MOVEMENT, FLOAT32
from .jaxprs import nbytes_of
from .totals import is_low


class Collective(NamedTuple):
    """An exchange between devices.

    Args:
        compiled: What compilers call it.
        sent: What each of n devices sends of the bytes of its operand in a ring, which no algorithm
            beats in bytes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    """

    compiled: str
    sent: Callable[[int], float]


_ALL_REDUCE = Collective("all-reduce", lambda n: 2 * (n - 1) / n)
COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {
        "psum": _ALL_REDUCE,
        "pmax": _ALL_REDUCE,
        "pmin": _ALL_REDUCE,
        "all_gather": Collective("all-gather", lambda n: n - 1),
        "reduce_scatter": Collective("reduce-scatter", lambda n: (n - 1) / n),
        "all_to_all": Collective("all-to-all", lambda n: (n - 1) / n),
        "ragged_all_to_all": Collective("ragged-all-to-all", lambda n: (n - 1) / n),
        "ppermute": Collective("collective-permute", lambda n: 1 if n > 1 else 0),
    }
)
"""The collectives by the primitives of JAX, which has other forms of most: see `collective_of`."""

# What asks XLA's partitioner for communication that is in no jaxpr.
_PARTITIONED = frozenset(("sharding_constraint", "reshard"))


@dataclasses.dataclass(frozen=True)
class Wire:
    """The collectives of one kind, dtype and number of devices.

    Args:
        collective: The primitive: ``"psum"``, ``"all_gather"``, ``"reduce_scatter"``,
            ``"all_to_all"``, ``"ppermute"``.
        dtype: The dtype of what is sent.
        devices: How many devices take part; None where the program does not say.
        times: How often they run.
        nbytes: The bytes that each device sends, in a ring.
        float32_nbytes: The same, with what is in 16 or 8 bits in float32.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jmp_autocast import BF16, explain
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(auto,))
        >>> product = lambda w, x: x @ jax.lax.all_gather(w, "d", tiled=True)
        >>> parted = jax.shard_map(product, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        >>> shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 8), (16, 64))]
        >>> (wire,) = explain(parted, *shapes, policy=BF16).wire
        >>> wire.dtype, wire.devices, wire.float32_nbytes // wire.nbytes
        ('bfloat16', 4, 2)
    """

    collective: str
    dtype: str
    devices: int | None
    times: int
    nbytes: int
    float32_nbytes: int


def wire_of(jaxpr: AnyJaxpr) -> tuple[Wire, ...]:
    """Returns the collectives of a program, those of the most bytes first.

    Args:
        jaxpr: The program that runs.
    """
    if not any(_axes(eqn) for eqn, _ in equations_in(jaxpr)):
        return ()
    # A product hands out its float32 operands for a gradient that nobody takes here: what gathers
    # them is dead, and XLA removes it.
    plain = without_dead_equations(body_of(finalise(jaxpr, platform="tpu")))
    sums: dict[tuple[Any, ...], list[int]] = {}
    for eqn, times in equations_in(plain):
        if not (axes := _axes(eqn)):
            continue
        kind, devices = collective_of(eqn.primitive.name), devices_along(eqn, axes)
        # Without a number of devices two are the least.
        share = times * COLLECTIVES[kind].sent(devices or 2)
        # One equation may send several arrays.
        for atom in eqn.invars:
            dtype = str(getattr(atom.aval, "dtype", None))
            sent = sums.setdefault((kind, dtype, devices), [0, 0, 0])
            sent[0] += times
            for k, name in enumerate((dtype, FLOAT32.name if is_low(dtype) else dtype), 1):
                sent[k] += round(share * nbytes_of(atom, name))
    found = [Wire(*key, *sent) for key, sent in sums.items()]
    return tuple(sorted(found, key=lambda wire: -wire.nbytes))


def _axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Returns the axes over which an equation sends, () where it sends nothing."""
    return collective_axes(eqn) if collective_of(eqn.primitive.name) else ()


def collective_of(primitive: str) -> str:
    """Returns the collective that a primitive is one form of, ``""`` where it is none.

    Args:
        primitive: The name of the primitive.

    Example:
        >>> collective_of("psum_invariant"), collective_of("all_gather_reduced_start")
        ('psum', 'all_gather')
        >>> collective_of("dot_general")
        ''
    """
    name = primitive.removeprefix("unreduced_").removesuffix("_start")
    name = name.removesuffix("_invariant").removesuffix("_reduced")
    return name if name in COLLECTIVES else ""


def is_partitioned(visits: Sequence[Visit], arguments: Sequence[Any]) -> bool:
    """Returns whether XLA's partitioner adds collectives, which are in no jaxpr.

    Args:
        visits: What `walk_plan` returns.
        arguments: The arrays of the call, or what stands for them.
    """
    if any(visit.eqn.primitive.name in _PARTITIONED for visit in visits):
        return True
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        return True
    shardings = (getattr(x, "sharding", None) for x in arguments)
    return any(getattr(sharding, "num_devices", 1) > 1 for sharding in shardings)


def wide_gradients(visits: Sequence[Visit], params: Set[Origin]) -> int:
    """Returns the bytes of gradients of weights that products hand out in float32.

    Where arrays are split over devices, the partitioner adds these up in it. What `shard_map` holds
    does not count: there the program itself adds.

    Args:
        visits: What `walk_plan` returns; also of a program that holds autocast.
        params: The paths of the weights.
    """
    sizes: dict[Origin, int] = {}
    inside = -1
    for visit in visits:
        if visit.eqn.primitive.name == "shard_map":
            inside = max(inside, visit.index + visit.inner)
        for i in _with_wide_gradient(visit) if visit.index > inside else ():
            weight = behind(visits, visit.origins[i], DATA_MOVEMENT)
            # The uses of one weight are added up before.
            size = visit.times * math.prod(aval_of(visit.eqn.invars[i]).shape)
            sizes[weight] = max(sizes.get(weight, 0), size)
    return FLOAT32.itemsize * sum(sizes[weight] for weight in sizes.keys() & params)


def _with_wide_gradient(visit: Visit) -> Sequence[int]:
    """Returns the positions of operands whose gradient a product hands out in float32."""
    plan = visit.plan
    if isinstance(plan.action, Contract):
        pairs = enumerate(zip(plan.given[:2], plan.operands[:2], strict=True))
        cast = [
            i
            for i, (x, dtype) in pairs
            if x.source and x.dtype == FLOAT32 and dtype in COMPUTE_DTYPES
        ]
        return cast if plan.action.of_sources else ()
    # What autocast has made of one has the float32 sources of its operands behind them.
    ran = contraction_in(visit.eqn)
    return range(len(ran.invars), len(visit.eqn.invars)) if ran else ()
