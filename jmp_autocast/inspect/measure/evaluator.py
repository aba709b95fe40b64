"""Runs programs side by side, and measures their equations.

A program is one way to run a jaxpr: as it was traced, or as `autocast` rewrites it. A reading holds
the measurements of an equation over all its runs, such as its count of NaNs. The probe measures.

Loops stay loops: the readings of a body are carried and merged over the iterations. All programs
take the branch of the first program, and end a ``while`` when the first program ends it.

The flags of a value are bits such as "it holds a NaN". The tick counts the measured equations that
have run since the start of the program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ...interpreters.compat import (
    AnyJaxpr,
    JaxprEqn,
    collective_axes,
    consts_of,
    device_varying,
    literal_value,
)
from ...interpreters.primitives import structure
from ...interpreters.primitives.evaluate import evaluate
from ...interpreters.primitives.structure import Body, bodies
from .devices import on_each_device, on_mesh_of, on_this_mesh
from .measured import is_measurable, is_measured, largest_element, measured_equations
from .programs import Arrays, Flags, Program, Programs, Values, each, flags_of
from .recorder import EquationRun, Probe, Recorder, concatenated


class Evaluated(NamedTuple):
    """The outcome of a jaxpr. It is a pytree: loops carry it, and branches return it.

    Args:
        outputs: The outputs of the jaxpr.
        readings: The readings of its measured equations, in the order of `measured_equations`.
        tick: The number of measured equations that have run since the start of the program.
    """

    outputs: list[Arrays]
    readings: Any
    tick: Any


class EqnContext(NamedTuple):
    """An equation, and the state of the jaxpr that holds it.

    Args:
        i: The position of the equation in its jaxpr.
        eqn: The equation.
        programs: The programs of the jaxpr.
        recorder: The recorder of the jaxpr's readings.
    """

    i: int
    eqn: JaxprEqn
    programs: Programs
    recorder: Recorder

    def inner(self) -> list[Programs]:
        """Returns the programs of each jaxpr inside the equation."""
        inner = (program.inner(self.i, self.eqn) for program in self.programs)
        return list(zip(*inner, strict=True))


class Evaluator:
    """Runs a jaxpr once for each program, and measures its equations by a probe."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        # The bodies of these primitives cannot be inlined: each returns its readings as outputs.
        self._rules: dict[str, Callable[..., Evaluated]] = {
            "cond": self._cond,
            "scan": self._scan,
            "while": self._while,
            "shard_map": self._shard_map,
        }

    def start(self, jaxpr: AnyJaxpr, programs: Programs, arrays: Sequence[Any]) -> Evaluated:
        """Runs a closed jaxpr on the same arguments in all programs."""
        # Ticks are uint32: without x64 JAX has no wider integer, and int32 would end at 2**31.
        return self._measure(jaxpr, programs, [(x,) * len(programs) for x in arrays], jnp.uint32(0))

    def _measure(
        self, jaxpr: AnyJaxpr, programs: Programs, args: Sequence[Arrays], tick: Any
    ) -> Evaluated:
        """Runs a jaxpr with a recorder of its own, which starts at ``tick``."""
        recorder = Recorder(self._probe, tick)
        outputs = self._run(jaxpr, programs, self._given(args), recorder)
        recorder.settle()
        return Evaluated([value.arrays for value in outputs], recorder.readings, recorder.tick)

    def _run(
        self, jaxpr: AnyJaxpr, programs: Programs, args: list[Values], recorder: Recorder
    ) -> list[Values]:
        """Runs a jaxpr, and returns its outputs in the dtypes that its caller expects."""

        def known(arrays: Iterable[Any]) -> list[Values]:
            return self._given((x,) * len(programs) for x in arrays)

        def literal(atom: Any) -> Values:
            value = literal_value(atom)
            is_number = isinstance(value, bool | int | float | complex)
            return known([np.asarray(value, atom.aval.dtype)[()] if is_number else value])[0]

        def step(i: int, eqn: JaxprEqn, operands: list[Values]) -> list[Values]:
            ctx = EqnContext(i, eqn, programs, recorder)
            if not bodies(eqn):
                return self._emit(ctx, operands)
            # At the boundaries of its bodies, an equation casts to the dtypes of its plan.
            operands = each(programs, lambda program, xs: program.enter(i, xs), operands)
            results = self._inside(ctx, operands)
            return each(programs, lambda program, xs: program.leave(i, xs), results)

        outputs = evaluate(jaxpr, known(consts_of(jaxpr)), args, literal, step)
        return each(programs, Program.outputs, outputs)

    def _given(self, arrays: Iterable[Arrays]) -> list[Values]:
        """Returns `Values` for arrays that no measured equation of this jaxpr has computed."""
        # The flags are those of the first program, whose control flow the other programs follow.
        return [Values(x, frozenset((self._flags(x[0]),))) for x in arrays]

    def _flags(self, array: Any) -> Flags:
        """Returns a cached function that computes the flags of an array."""

        @functools.cache
        def flags() -> Any:
            with on_mesh_of(array):
                bits = self._probe.flags_of(array)
            return on_this_mesh(bits)

        return flags

    def _inside(self, ctx: EqnContext, operands: list[Values]) -> list[Values]:
        """Runs the bodies of an equation; the body of a call is inlined."""
        eqn, recorder = ctx.eqn, ctx.recorder
        if (rule := self._rules.get(eqn.primitive.name)) is not None:
            recorder.settle()
            outputs, *measured = rule(ctx, [value.arrays for value in operands], recorder.tick)
            recorder.take(*measured)
            return self._given(outputs)
        (body,), (programs,) = bodies(eqn), ctx.inner()
        results = self._run(body.jaxpr, programs, [operands[k] for k in body.operands], recorder)
        return [results[body.results.index(k)] for k in range(len(eqn.outvars))]

    def _emit(self, ctx: EqnContext, operands: list[Values]) -> list[Values]:
        """Runs one equation, and measures it."""
        i, eqn, programs, recorder = ctx

        def run(k: int, arrays: Sequence[Any]) -> list[Any]:
            return programs[k].emit(i, eqn, arrays)

        arrays = [[value.arrays[k] for value in operands] for k in range(len(programs))]
        results = list(map(run, range(len(arrays)), arrays))
        flags = flags_of(operands)
        if is_measured(eqn):
            if self._probe.has_flags and (axes := collective_axes(eqn)):
                flags = flags_of(self._given((_on_all_devices(x, axes),) for x in arrays[0]))
            flags = recorder.add(EquationRun(eqn, arrays, results, run), flags)
        return [Values(xs, flags) for xs in zip(*results, strict=True)]

    # --- bodies that cannot be inlined --------------------------------------------------------

    def _cond(self, ctx: EqnContext, operands: list[Arrays], tick: Any) -> Evaluated:
        branches, inner = bodies(ctx.eqn), ctx.inner()
        nothing = [self._nothing(branch) for branch in branches]

        def branch(k: int) -> Callable[..., Evaluated]:
            def run(arrays: list[Arrays], tick: Any) -> Evaluated:
                found = self._measure(branches[k].jaxpr, inner[k], arrays, tick)
                # Each branch returns readings for all branches. Those of the other branches are
                # the readings of equations that have not run.
                readings = concatenated([*nothing[:k], found.readings, *nothing[k + 1 :]])
                return Evaluated(found.outputs, *device_varying((readings, found.tick)))

            return run

        # All programs take the branch of the first program: values of different branches could not
        # be compared.
        rest = [operands[i] for i in branches[0].operands]
        return lax.switch(operands[0][0], [branch(k) for k in range(len(branches))], rest, tick)

    def _scan(self, ctx: EqnContext, operands: list[Arrays], tick: Any) -> Evaluated:
        (body,), (programs,) = bodies(ctx.eqn), ctx.inner()
        first, last = body.fixed, body.fixed + len(body.carries)
        fixed, carry, scanned = operands[:first], operands[first:last], operands[last:]

        def step(state: Evaluated, slices: Any) -> Any:
            args = [*fixed, *state.outputs, *slices]
            found = self._measure(body.jaxpr, programs, args, state.tick)
            # The readings of the iterations are merged. If `scan` stacked them, a scan of 1,000
            # steps would return 1,000 readings per equation.
            merged = self._probe.merge(state.readings, found.readings)
            count = len(carry)
            return Evaluated(found.outputs[:count], merged, found.tick), found.outputs[count:]

        start = Evaluated(carry, *device_varying((self._nothing(body), tick)))
        end, stacked = lax.scan(step, start, scanned, **structure.scan_direction(ctx.eqn))
        return end._replace(outputs=[*end.outputs, *stacked])

    def _while(self, ctx: EqnContext, operands: list[Arrays], tick: Any) -> Evaluated:
        (cond, body), (of_cond, of_body) = bodies(ctx.eqn), ctx.inner()
        for_cond = [operands[i] for i in cond.operands[: cond.fixed]]
        for_body = [operands[i] for i in body.operands[: body.fixed]]
        start = [operands[i] for i in body.operands[body.fixed :]]
        merge = self._probe.merge

        def predicate(carry: list[Arrays], tick: Any) -> tuple[Any, Any, Any]:
            found = self._measure(cond.jaxpr, of_cond, [*for_cond, *carry], tick)
            return found.outputs[0][0], found.readings, found.tick

        def step(state: Any) -> Any:
            before, in_cond, (carry, in_body, tick) = state
            found = self._measure(body.jaxpr, of_body, [*for_body, *carry], tick)
            outputs = [_where(before, *pair) for pair in zip(found.outputs, carry, strict=True)]
            # The first program decides when the loop ends.
            goes_on, again, tick = predicate(outputs, found.tick)
            in_body = merge(in_body, found.readings)
            return goes_on, merge(in_cond, again), Evaluated(outputs, in_body, tick)

        # The predicate of `lax.while_loop` can only return a bool, so the loop carries the readings
        # of the predicate, which runs once more than the body.
        goes_on, in_cond, tick = predicate(start, tick)
        in_cond, in_body, tick = device_varying((in_cond, self._nothing(body), tick))
        state = goes_on, in_cond, Evaluated(start, in_body, tick)
        _, in_cond, last = lax.while_loop(lambda state: jnp.any(state[0]), step, state)
        return last._replace(readings=concatenated([in_cond, last.readings]))

    def _shard_map(self, ctx: EqnContext, operands: list[Arrays], tick: Any) -> Evaluated:
        (held,), (programs,) = bodies(ctx.eqn), ctx.inner()
        options = structure.shard_map_options(ctx.eqn)
        mesh, manual = options["mesh"], options["axis_names"]
        axes = tuple(a for a in mesh.axis_names if a in manual)

        def body(arrays: list[Arrays], tick: Any) -> Evaluated:
            found = self._measure(held.jaxpr, programs, arrays, tick)
            readings = jax.tree.map(lambda x: x[None], device_varying(found.readings))
            # Devices may run different numbers of equations, as in a branch. The next tick is the
            # largest of all devices.
            return Evaluated(found.outputs, readings, lax.pmax(device_varying(found.tick), axes))

        # A value has the same shape and sharding in all programs, so each spec is repeated.
        specs = (options["in_specs"], options["out_specs"])
        given, made = ([(spec,) * len(programs) for spec in each] for each in specs)
        options["in_specs"] = (given, PartitionSpec())
        options["out_specs"] = Evaluated(made, PartitionSpec(axes), PartitionSpec())
        found: Evaluated = jax.shard_map(body, **options)(operands, tick)
        devices = range(math.prod(mesh.shape[a] for a in axes))
        # Readings are merged outside of the map, in the order of the devices, so that the first run
        # with a fault is the same in each call.
        readings = on_each_device(found.readings)
        each = [jax.tree.map(lambda x, k=k: x[k], readings) for k in devices]
        return found._replace(readings=functools.reduce(self._probe.merge, each))

    def _nothing(self, body: Body) -> Any:
        """Returns the readings of a body that has not run."""
        return self._probe.nothing(sum(1 for _ in measured_equations(body.jaxpr)))


def _where(goes_on: Any, new: Arrays, old: Arrays) -> Arrays:
    """Returns the next carry of a loop, for each program.

    A loop under `vmap` has a predicate for each element of the batch, which is the first dimension
    of all carries. It runs until the last element has ended, and no longer changes the carries of
    an element that has ended.
    """
    if not jnp.ndim(goes_on):
        return new
    rows = [goes_on.reshape(goes_on.shape + (1,) * (x.ndim - goes_on.ndim)) for x in new]
    return tuple(map(jnp.where, rows, new, old))


def _on_all_devices(x: Any, axes: Sequence[Any]) -> Any:
    """Gathers one number per device: a NaN or infinity of a collective's operand, else 0.

    A NaN in a sum over devices may come from the operand of another device, and is then no fault of
    the collective. So the flags of the operand are those of all devices.
    """
    if not is_measurable(jax.typeof(x)):
        return x
    bad = jnp.where(jnp.isfinite(x), jnp.zeros_like(jnp.abs(x)), jnp.abs(x))
    return lax.all_gather(device_varying(largest_element(bad)), axes)
