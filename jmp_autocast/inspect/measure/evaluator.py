"""Runs programs side by side, and takes a reading at each equation.

Loops stay loops: the readings of what is inside are carried along and merged over the iterations.
Where programs could part ways (a branch, the end of a ``while``) all follow the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ...interpreters.compat import collective_axes, consts_of, device_varying, literal_value
from ...interpreters.primitives.evaluate import evaluate
from ...interpreters.primitives.structure import Body, bodies, scan_direction, shard_map_options
from .basic_blocks import BasicBlock, EquationRun, FlagRefs, Given, Probe, union
from .materialize import materialized
from .measured import (
    is_entered,
    is_measurable,
    is_measured,
    measured_equations,
    runs_in_place,
)
from .programs import Program

Programs: TypeAlias = Sequence[Program]


class Values(NamedTuple):
    """One value of the program, as each of the programs has it.

    Args:
        arrays: The value in each program.
        flags: Where its flags are found.
    """

    arrays: tuple[Any, ...]
    flags: FlagRefs


class Evaluated(NamedTuple):
    """What running a jaxpr gave.

    Args:
        outputs: Its outputs.
        readings: The readings of its measured equations, in the order of `measured_equations`.
        tick: The number of measured equations that have run.
    """

    outputs: list[Values]
    readings: Any
    tick: Any


class Evaluator:
    """Runs jaxprs in all programs, and takes readings.

    Args:
        probe: What is measured.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._rules: dict[str, Callable[..., Evaluated]] = {
            "cond": self._cond,
            "scan": self._scan,
            "while": self._while,
            "shard_map": self._shard_map,
        }

    def start(self, jaxpr: Any, programs: Programs, arrays: Sequence[Any]) -> Evaluated:
        """Runs a whole program on the same arguments in all programs.

        Args:
            jaxpr: The closed jaxpr.
            programs: The programs.
            arrays: The arguments.
        """
        args = _unmeasured([(x,) * len(programs) for x in arrays])
        return self._measure(jaxpr, programs, args, jnp.uint32(0))

    def _measure(
        self, jaxpr: Any, programs: Programs, args: Sequence[Values], tick: Any
    ) -> Evaluated:
        """Runs a jaxpr whose readings stand apart: that of a program, loop, branch or device map.

        Args:
            jaxpr: The jaxpr.
            programs: The programs of this jaxpr.
            args: Its arguments.
            tick: The number of measured equations that ran before.
        """
        recorder = _Recorder(self._probe, tick)
        outputs = self._run(jaxpr, programs, args, recorder)
        recorder.settle()
        return Evaluated(outputs, _concatenated(recorder.readings), recorder.tick)

    def _run(
        self, jaxpr: Any, programs: Programs, args: Sequence[Values], recorder: _Recorder
    ) -> list[Values]:
        count = len(programs)

        def step(i: int, eqn: Any, operands: list[Values]) -> list[Values]:
            run = self._enter if is_entered(eqn) else self._emit
            return run(i, eqn, programs, operands, recorder)

        outputs = evaluate(
            jaxpr,
            _unmeasured([(x,) * count for x in consts_of(jaxpr)]),
            args,
            lambda literal: _unmeasured([(literal_value(literal),) * count])[0],
            step,
        )
        return _each(programs, Program.outputs, outputs)

    def _enter(
        self, i: int, eqn: Any, programs: Programs, operands: list[Values], recorder: _Recorder
    ) -> list[Values]:
        """Runs what is inside an equation."""
        inner = list(zip(*(program.inner(i, eqn) for program in programs), strict=True))
        operands = _each(programs, lambda program, xs: program.enter(i, xs), operands)
        if runs_in_place(eqn):
            (body,) = bodies(eqn)
            args = [operands[k] for k in body.operands]
            made = self._run(body.jaxpr, inner[0], args, recorder)
            results = [made[body.results.index(k)] for k in range(len(eqn.outvars))]
        else:
            recorder.settle()
            evaluated = self._rules[eqn.primitive.name](eqn, inner, operands, recorder.tick)
            recorder.take(evaluated)
            results = evaluated.outputs
        return _each(programs, lambda program, xs: program.leave(i, xs), results)

    def _emit(
        self, i: int, eqn: Any, programs: Programs, operands: list[Values], recorder: _Recorder
    ) -> list[Values]:
        """Runs one equation, and measures it."""

        def run(k: int, arrays: Sequence[Any]) -> list[Any]:
            return [value.array for value in programs[k].emit(i, eqn, arrays)]

        arrays = [[value.arrays[k] for value in operands] for k in range(len(programs))]
        results = [run(k, each) for k, each in enumerate(arrays)]
        flags = union(value.flags for value in operands)
        if is_measured(eqn):
            if self._probe.flags and (axes := collective_axes(eqn)):
                met = _unmeasured([(_on_all_devices(x, axes),) for x in arrays[0]])
                flags = union(value.flags for value in met)
            results = [[materialized(x) for x in each] for each in results]
            flags = recorder.block.add(EquationRun(eqn, arrays, results, run), flags)
        return [Values(each, flags) for each in zip(*results, strict=True)]

    # --- what has a jaxpr inside that cannot be run in its place ------------------------------

    def _cond(
        self, eqn: Any, inner: Sequence[Programs], operands: list[Values], tick: Any
    ) -> Evaluated:
        branches = bodies(eqn)
        nothing = [self._probe.nothing(_count(branch)) for branch in branches]

        def branch(k: int) -> Callable[..., Any]:
            def run(arrays: Any, tick: Any) -> Any:
                evaluated = self._measure(branches[k].jaxpr, inner[k], _unmeasured(arrays), tick)
                # All branches return the readings of all branches: those not taken did not run.
                readings = _concatenated([*nothing[:k], evaluated.readings, *nothing[k + 1 :]])
                measured = device_varying((readings, evaluated.tick))
                return _arrays(evaluated.outputs), *measured

            return run

        index, rest = operands[0].arrays[0], _at(operands, branches[0].operands)
        runs = [branch(k) for k in range(len(branches))]
        outputs, readings, tick = lax.switch(index, runs, rest, tick)
        return Evaluated(_unmeasured(outputs), readings, tick)

    def _scan(
        self, eqn: Any, inner: Sequence[Programs], operands: list[Values], tick: Any
    ) -> Evaluated:
        (body,) = bodies(eqn)
        arrays, carries = _at(operands, body.operands), len(body.carries)
        fixed, moving = arrays[: body.fixed], arrays[body.fixed :]

        def step(state: Any, slices: Any) -> Any:
            carry, readings, tick = state
            args = _unmeasured([*fixed, *carry, *slices])
            evaluated = self._measure(body.jaxpr, inner[0], args, tick)
            made = _arrays(evaluated.outputs)
            merged = self._probe.merge(readings, evaluated.readings)
            return (made[:carries], merged, evaluated.tick), made[carries:]

        nothing = self._probe.nothing(_count(body))
        (carry, readings, tick), ys = lax.scan(
            step,
            (moving[:carries], *device_varying((nothing, tick))),
            moving[carries:],
            **scan_direction(eqn),
        )
        return Evaluated(_unmeasured([*carry, *ys]), readings, tick)

    def _while(
        self, eqn: Any, inner: Sequence[Programs], operands: list[Values], tick: Any
    ) -> Evaluated:
        cond, body = bodies(eqn)
        of_cond = _at(operands, cond.operands[: cond.fixed])
        of_body = _at(operands, body.operands[: body.fixed])
        start = _at(operands, body.operands[body.fixed :])
        merge = self._probe.merge

        def ask(carry: Any, tick: Any) -> tuple[Any, Any, Any]:
            evaluated = self._measure(cond.jaxpr, inner[0], _unmeasured([*of_cond, *carry]), tick)
            return evaluated.outputs[0].arrays[0], evaluated.readings, evaluated.tick

        def step(state: Any) -> Any:
            _, carry, asked, done, tick = state
            evaluated = self._measure(body.jaxpr, inner[1], _unmeasured([*of_body, *carry]), tick)
            carry = _arrays(evaluated.outputs)
            goes_on, again, tick = ask(carry, evaluated.tick)
            return goes_on, carry, merge(asked, again), merge(done, evaluated.readings), tick

        # The predicate is asked once more than the body runs, so its readings are carried, too:
        # a predicate of `lax.while_loop` returns nothing but a bool.
        goes_on, asked, tick = ask(start, tick)
        counted = device_varying((asked, self._probe.nothing(_count(body)), tick))
        state = lax.while_loop(lambda state: state[0], step, (goes_on, start, *counted))
        _, carry, asked, done, tick = state
        return Evaluated(_unmeasured(carry), _concatenated([asked, done]), tick)

    def _shard_map(
        self, eqn: Any, inner: Sequence[Programs], operands: list[Values], tick: Any
    ) -> Evaluated:
        (held,), options, count = bodies(eqn), shard_map_options(eqn), len(inner[0])
        mesh, manual = options["mesh"], options["axis_names"]
        axes = tuple(a for a in mesh.axis_names if a in manual)
        everywhere = jax.sharding.PartitionSpec()

        def body(arrays: Any, tick: Any) -> Any:
            evaluated = self._measure(held.jaxpr, inner[0], _unmeasured(arrays), tick)
            readings = jax.tree.map(lambda x: x[None], device_varying(evaluated.readings))
            last = lax.pmax(device_varying(evaluated.tick), axes)
            return _arrays(evaluated.outputs), readings, last

        def specs(name: str) -> list[Any]:
            return [(spec,) * count for spec in options[name]]

        options |= {
            "in_specs": (specs("in_specs"), everywhere),
            "out_specs": (specs("out_specs"), jax.sharding.PartitionSpec(axes), everywhere),
        }
        mapped = jax.shard_map(body, **options)
        outputs, per_device, tick = mapped(_arrays(operands), tick)
        readings = jax.tree.map(lambda x: x[0], per_device)
        for k in range(1, math.prod(mesh.shape[a] for a in axes)):
            readings = self._probe.merge(readings, jax.tree.map(lambda x, k=k: x[k], per_device))
        return Evaluated(_unmeasured(outputs), readings, tick)


class _Recorder:
    """The readings of a jaxpr so far, in the order of its measured equations."""

    def __init__(self, probe: Probe, tick: Any) -> None:
        self._probe = probe
        self.readings: list[Any] = []
        self.tick = tick
        self.block = BasicBlock(probe, tick)

    def settle(self) -> None:
        """Ends a basic block."""
        self._add(*self.block.settle())

    def take(self, evaluated: Evaluated) -> None:
        """Takes over the readings of what is inside an equation."""
        self._add(evaluated.readings, evaluated.tick)

    def _add(self, readings: Any, tick: Any) -> None:
        self.readings.append(readings)
        self.tick = tick
        self.block = BasicBlock(self._probe, tick)


def _on_all_devices(x: Any, axes: Sequence[Any]) -> Any:
    """Returns what is not finite in an operand of a collective, from all devices that take part.

    A NaN that a sum over devices returns may come from an operand on another device, and then this
    equation did not make it.
    """
    if not is_measurable(jax.typeof(x)):
        return x
    bad = jnp.where(jnp.isfinite(x), jnp.zeros_like(jnp.abs(x)), jnp.abs(x))
    return lax.all_gather(device_varying(jnp.max(bad)), axes)


def _unmeasured(values: Sequence[tuple[Any, ...]]) -> list[Values]:
    """Returns values that no measured equation of this jaxpr made; the first program has flags."""
    return [Values(arrays, frozenset((Given(arrays[0]),))) for arrays in values]


def _arrays(values: Sequence[Values]) -> list[tuple[Any, ...]]:
    return [value.arrays for value in values]


def _at(values: Sequence[Values], positions: Sequence[int]) -> list[tuple[Any, ...]]:
    return [values[k].arrays for k in positions]


def _concatenated(parts: Sequence[Any]) -> Any:
    """Returns the readings of several groups of equations as one."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def _each(
    programs: Programs, function: Callable[[Program, list[Any]], list[Any]], values: list[Values]
) -> list[Values]:
    """Applies a function of a program and its arrays to values of all programs."""
    columns = [
        function(program, [value.arrays[k] for value in values])
        for k, program in enumerate(programs)
    ]
    return [
        Values(x, value.flags) for x, value in zip(zip(*columns, strict=True), values, strict=True)
    ]


def _count(body: Body) -> int:
    return sum(1 for _ in measured_equations(body.jaxpr))
