"""Running programs side by side, and taking a reading at each equation.

Loops stay loops: the readings of what is inside are carried along and merged over the iterations.
Where lanes could part ways (a branch, the end of a ``while``) all follow the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...interpreters.compat import (
    Literal,
    body_of,
    collective_axes,
    consts_of,
    device_varying,
    equation_context,
    literal_value,
    scan_split,
    shard_map_axes,
)
from .batching import Block, Given, Probe, Refs, Run, union
from .materialize import written_out
from .measured import INLINED, bodies_of, is_measured, is_site, sites_in
from .programs import Lane


class Seen(NamedTuple):
    """One value in all lanes.

    Args:
        arrays: The value in each lane.
        refs: Where to find what is known of it.
    """

    arrays: tuple[Any, ...]
    refs: Refs


class Walked(NamedTuple):
    """What running a jaxpr gave.

    Args:
        outputs: Its outputs.
        readings: The readings of its sites.
        tick: The number of sites that have run.
    """

    outputs: list[Seen]
    readings: Any
    tick: Any


class Walker:
    """Runs jaxprs in all lanes, and takes readings.

    Args:
        probe: What is measured.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def start(self, jaxpr: Any, lanes: Sequence[Lane], arrays: Sequence[Any]) -> Walked:
        """Runs a whole program on the same arguments in all lanes.

        Args:
            jaxpr: The closed jaxpr.
            lanes: The lanes.
            arrays: The arguments.
        """
        return self.walk(jaxpr, lanes, given([(x,) * len(lanes) for x in arrays]), jnp.uint32(0))

    def walk(self, jaxpr: Any, lanes: Sequence[Lane], args: Sequence[Seen], tick: Any) -> Walked:
        """Runs a jaxpr.

        Args:
            jaxpr: The jaxpr.
            lanes: The lanes of this jaxpr.
            args: Its arguments.
            tick: The number of sites that ran before.
        """
        recorder = _Recorder(self.probe, tick)
        outputs = self._run(jaxpr, lanes, args, recorder)
        recorder.settle()
        return Walked(outputs, concatenated(recorder.readings), recorder.tick)

    def _run(
        self, jaxpr: Any, lanes: Sequence[Lane], args: Sequence[Seen], recorder: _Recorder
    ) -> list[Seen]:
        body = body_of(jaxpr)
        consts = given([(x,) * len(lanes) for x in consts_of(jaxpr)])
        env = dict(zip([*body.constvars, *body.invars], [*consts, *args], strict=True))

        def look_up(atom: Any) -> Seen:
            if isinstance(atom, Literal):
                return given([(literal_value(atom),) * len(lanes)])[0]
            return env[atom]

        for i, eqn in enumerate(body.eqns):
            operands = [look_up(v) for v in eqn.invars]
            with equation_context(eqn):
                results = self._equation(i, eqn, lanes, operands, recorder)
            env.update(zip(eqn.outvars, results, strict=True))
        outputs = [look_up(v) for v in body.outvars]
        return _each_lane(lanes, lambda lane, xs: lane.outputs(xs), outputs)

    def _equation(
        self,
        i: int,
        eqn: Any,
        lanes: Sequence[Lane],
        operands: list[Seen],
        recorder: _Recorder,
    ) -> list[Seen]:
        name = eqn.primitive.name
        if name in INLINED or name in _RULES:
            inner = list(zip(*(lane.inner(i, eqn) for lane in lanes), strict=True))
            operands = _each_lane(lanes, lambda lane, xs: lane.enter(i, xs), operands)
            if name in INLINED:
                results = self._run(bodies_of(eqn)[0], inner[0], operands, recorder)
            else:
                recorder.settle()
                walked = _RULES[name](self, eqn, inner, operands, recorder.tick)
                recorder.take(walked)
                results = walked.outputs
            return _each_lane(lanes, lambda lane, xs: lane.leave(i, xs), results)

        def again(k: int, arrays: Sequence[Any]) -> list[Any]:
            return lanes[k].emit(i, eqn, arrays)

        arrays = [[value.arrays[k] for value in operands] for k in range(len(lanes))]
        results = [again(k, each) for k, each in enumerate(arrays)]
        refs = union(value.refs for value in operands)
        if self.probe.flags and is_site(eqn) and (axes := collective_axes(eqn)):
            refs = union(value.refs for value in given([(_met(x, axes),) for x in arrays[0]]))
        if is_site(eqn):
            results = [[written_out(x) for x in each] for each in results]
            refs = recorder.block.add(Run(eqn, arrays, results, again), refs)
        return [Seen(each, refs) for each in zip(*results, strict=True)]


class _Recorder:
    """The readings of a body so far, in the order of its sites."""

    def __init__(self, probe: Probe, tick: Any) -> None:
        self._probe = probe
        self.readings: list[Any] = []
        self.tick = tick
        self.block = Block(probe, tick)

    def settle(self) -> None:
        """Ends a block."""
        readings, self.tick = self.block.settle()
        self.readings.append(readings)
        self.block = Block(self._probe, self.tick)

    def take(self, walked: Walked) -> None:
        """Takes over the readings of what is inside an equation."""
        self.readings.append(walked.readings)
        self.tick = walked.tick
        self.block = Block(self._probe, self.tick)


def _met(x: Any, axes: Sequence[Any]) -> Any:
    """Returns what is not finite in an operand of a collective, on all devices that take part."""
    if not is_measured(jax.typeof(x)):
        return x
    bad = jnp.where(jnp.isfinite(x), jnp.zeros_like(jnp.abs(x)), jnp.abs(x))
    return lax.all_gather(device_varying(jnp.max(bad)), axes)


def given(arrays: Sequence[tuple[Any, ...]]) -> list[Seen]:
    """Returns values whose maker is not known."""
    return [Seen(each, frozenset((Given(each[0]),))) for each in arrays]


def concatenated(parts: Sequence[Any]) -> Any:
    """Returns the readings of several groups of sites as one."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def _each_lane(
    lanes: Sequence[Lane], function: Callable[[Lane, list[Any]], list[Any]], values: list[Seen]
) -> list[Seen]:
    """Applies a function of a lane and its arrays to values of all lanes."""
    if not values:
        return []
    columns = [
        function(lane, [value.arrays[k] for value in values]) for k, lane in enumerate(lanes)
    ]
    pairs = zip(zip(*columns, strict=True), values, strict=True)
    return [Seen(arrays, value.refs) for arrays, value in pairs]


Rule = Callable[[Walker, Any, Sequence[Sequence[Lane]], list[Seen], Any], Walked]
_RULES: dict[str, Rule] = {}


def _runs(name: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _RULES[name] = function
        return function

    return register


def _arrays(values: Sequence[Seen]) -> list[tuple[Any, ...]]:
    return [value.arrays for value in values]


@_runs("cond")
def _cond(
    walker: Walker, eqn: Any, inner: Sequence[Sequence[Lane]], operands: list[Seen], tick: Any
) -> Walked:
    counts = [_count(branch) for branch in bodies_of(eqn)]

    def branch(k: int) -> Callable[..., Any]:
        def run(arrays: Any, tick: Any) -> Any:
            walked = walker.walk(bodies_of(eqn)[k], inner[k], given(arrays), tick)
            readings = [walker.probe.nothing(count) for count in counts]
            readings[k] = walked.readings
            measured = device_varying((concatenated(readings), walked.tick))
            return _arrays(walked.outputs), *measured

        return run

    index, *rest = operands
    branches = [branch(k) for k in range(len(counts))]
    outputs, readings, tick = lax.switch(index.arrays[0], branches, _arrays(rest), tick)
    return Walked(given(outputs), readings, tick)


@_runs("scan")
def _scan(
    walker: Walker, eqn: Any, inner: Sequence[Sequence[Lane]], operands: list[Seen], tick: Any
) -> Walked:
    consts, carries = scan_split(eqn.params)
    (body,) = bodies_of(eqn)
    fixed, start = operands[:consts], operands[consts : consts + carries]
    xs = operands[consts + carries :]

    def step(state: Any, slices: Any) -> Any:
        carry, readings, tick = state
        args = [*given(_arrays(fixed)), *given(carry), *given(slices)]
        walked = walker.walk(body, inner[0], args, tick)
        arrays = _arrays(walked.outputs)
        merged = walker.probe.merge(readings, walked.readings)
        return (arrays[:carries], merged, walked.tick), arrays[carries:]

    nothing = walker.probe.nothing(_count(body))
    (carry, readings, tick), ys = lax.scan(
        step,
        (_arrays(start), *device_varying((nothing, tick))),
        _arrays(xs),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    return Walked(given([*carry, *ys]), readings, tick)


@_runs("while")
def _while(
    walker: Walker, eqn: Any, inner: Sequence[Sequence[Lane]], operands: list[Seen], tick: Any
) -> Walked:
    cond, body = bodies_of(eqn)
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body = _arrays(operands[:first]), _arrays(operands[first : first + second])
    merge = walker.probe.merge

    def ask(carry: Any, tick: Any) -> tuple[Any, Any, Any]:
        walked = walker.walk(cond, inner[0], given([*of_cond, *carry]), tick)
        return walked.outputs[0].arrays[0], walked.readings, walked.tick

    def step(state: Any) -> Any:
        _, carry, asked, done, tick = state
        walked = walker.walk(body, inner[1], given([*of_body, *carry]), tick)
        carry = _arrays(walked.outputs)
        goes_on, again, tick = ask(carry, walked.tick)
        return goes_on, carry, merge(asked, again), merge(done, walked.readings), tick

    start = _arrays(operands[first + second :])
    goes_on, asked, tick = ask(start, tick)
    counted = device_varying((asked, walker.probe.nothing(_count(body)), tick))
    state = lax.while_loop(lambda state: state[0], step, (goes_on, start, *counted))
    _, carry, asked, done, tick = state
    return Walked(given(carry), concatenated([asked, done]), tick)


@_runs("shard_map")
def _shard_map(
    walker: Walker, eqn: Any, inner: Sequence[Sequence[Lane]], operands: list[Seen], tick: Any
) -> Walked:
    params, lanes = eqn.params, len(inner[0])
    manual, mesh = shard_map_axes(params), params["mesh"]
    axes = tuple(a for a in mesh.axis_names if a in manual)
    everywhere = jax.sharding.PartitionSpec()

    def body(arrays: Any, tick: Any) -> Any:
        walked = walker.walk(params["jaxpr"], inner[0], given(arrays), tick)
        readings = jax.tree.map(lambda x: x[None], device_varying(walked.readings))
        last = lax.pmax(device_varying(walked.tick), axes)
        return _arrays(walked.outputs), readings, last

    def specs(name: str) -> list[Any]:
        return [(spec,) * lanes for spec in params[name]]

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs("in_specs"), everywhere),
        out_specs=(specs("out_specs"), jax.sharding.PartitionSpec(axes), everywhere),
        check_vma=params["check_vma"],
        axis_names=manual,
    )
    outputs, per_device, tick = mapped(_arrays(operands), tick)
    readings = jax.tree.map(lambda x: x[0], per_device)
    for k in range(1, math.prod(mesh.shape[a] for a in axes)):
        readings = walker.probe.merge(readings, jax.tree.map(lambda x, k=k: x[k], per_device))
    return Walked(given(outputs), readings, tick)


def _count(jaxpr: Any) -> int:
    return sum(1 for _ in sites_in(jaxpr))
