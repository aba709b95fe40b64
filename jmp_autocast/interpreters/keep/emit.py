"""Emits a program in the ambient trace, with its segments as `jax.checkpoint` functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from ..compat import (
    AnyJaxpr,
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    body_of,
    bound,
    consts_of,
    current_name_stack,
    equation_context,
    fresh_make_jaxpr,
    literal_value,
    mark_frames,
    name_scope,
    scope_names,
)
from ..primitives.cached_bind import bind_cached
from ..primitives.evaluate import as_function, evaluate
from ..primitives.structure import STRUCTURES, Body, bodies, rebound, shard_map_options
from ..primitives.traits import BACKWARD
from .choice import ResidualChoice
from .cut import cut_of
from .equal import alike
from .graph import Role, Step, Value, graph_of
from .segments import Unit, units_of

mark_frames(__file__)

# The checkpoint of a segment saves the values with this name. Users see it only in the jaxpr.
SAVED = "jmp_autocast_kept"

# JAX's cache of checkpoints compares policies by identity, so all segments share this object.
_POLICY = jax.checkpoint_policies.save_only_these_names(SAVED)


class _Atom(NamedTuple):
    """The array of a variable and its `Role`, used where equations are bound without a plan."""

    array: Any
    role: Role


class Site(NamedTuple):
    """The place of a jaxpr in the program.

    Args:
        scope: The names of the scopes around it, outermost first.
        in_loop: Whether it is the body of a loop, or inside of one.
    """

    scope: tuple[str, ...] = ()
    in_loop: bool = False


class Emitter:
    """Emits a program with planned residuals; each trace has its own instance.

    Args:
        choice: The user's choice.
    """

    def __init__(self, choice: ResidualChoice) -> None:
        self.choice = choice

    def run(
        self, closed: AnyJaxpr, args: Sequence[Any], roles: Sequence[Role], site: Site
    ) -> list[Any]:
        """Evaluates a jaxpr with planned residuals and returns its outputs.

        Args:
            closed: The jaxpr.
            args: Its arguments.
            roles: The role of each argument.
            site: The place of the jaxpr in the program.
        """
        if site.in_loop or not self.choice.loops_only:
            return self._run_planned(closed, args, roles, site)

        def step(i: int, eqn: JaxprEqn, operands: list[_Atom]) -> list[_Atom]:
            given = [x.role for x in operands]
            results = self._bind(eqn, [x.array for x in operands], given, site)
            is_cheap = "cheap" in BACKWARD.get(eqn.primitive.name, ())
            from_params = is_cheap and all(role is Role.PARAM for role in given)
            return [_Atom(x, Role.PARAM if from_params else Role.FRESH) for x in results]

        def param(x: Any) -> _Atom:
            return _Atom(literal_value(x) if isinstance(x, Literal) else x, Role.PARAM)

        consts = list(map(param, consts_of(closed)))
        atoms = [_Atom(x, role) for x, role in zip(args, roles, strict=True)]
        return [x.array for x in evaluate(closed, consts, atoms, param, step)]

    # --- one equation ---------------------------------------------------------------------------

    def _bind(
        self, eqn: JaxprEqn, arrays: list[Any], roles: Sequence[Role], site: Site
    ) -> Sequence[Any]:
        """Binds an equation, and plans residuals in its bodies if the user's choice allows it."""
        if _is_entered(eqn) and (site.in_loop or holds_loop(eqn) or not self.choice.loops_only):
            inner = site._replace(scope=(*site.scope, *scope_names(eqn)))
            functions = [self._function(eqn, body, roles, inner) for body in bodies(eqn)]
            if eqn.primitive.name == "shard_map":
                # `jax.shard_map` sets up the mesh axes for the trace of the body.
                (function,), options = functions, shard_map_options(eqn)
                return list(jax.shard_map(lambda *xs: tuple(function(*xs)), **options)(*arrays))
            jaxprs = [
                fresh_make_jaxpr(function, *(v.aval for v in body_of(body.jaxpr).invars))
                for function, body in zip(functions, bodies(eqn), strict=True)
            ]
            arrays, params = rebound(eqn, arrays, jaxprs, [()] * len(jaxprs))
            return bound(eqn.replace(params=params), arrays)
        if eqn.effects:
            return bound(eqn, arrays)
        results = bind_cached(eqn.primitive, arrays, eqn.params)
        return results if eqn.primitive.multiple_results else [results]

    def _function(
        self, eqn: JaxprEqn, body: Body, roles: Sequence[Role], site: Site
    ) -> Callable[..., list[Any]]:
        """Returns a function that evaluates a body with planned residuals."""
        given = [roles[i] for i in body.operands]
        if eqn.primitive.name == "scan":
            site = site._replace(in_loop=True)
            for i, role in enumerate(given):
                if role in (Role.PARAM, Role.SLICE):
                    given[i] = Role.PARAM if i < body.fixed else Role.SLICE
                else:
                    given[i] = Role.STORED if i < body.fixed else Role.FRESH
            for i, _ in body.carries:
                given[i] = Role.FRESH
        return lambda *xs: self.run(body.jaxpr, xs, given, site)

    # --- a planned jaxpr ------------------------------------------------------------------------

    def _run_planned(
        self, closed: AnyJaxpr, args: Sequence[Any], roles: Sequence[Role], site: Site
    ) -> list[Any]:
        graph = graph_of(closed, roles, lambda scope: self.choice.excludes((*site.scope, *scope)))
        units = units_of(graph, cut_of(graph, self.choice.share))
        env = dict(zip(graph.inputs, args, strict=True))
        env.update((v, v.const) for v in graph.consts)
        functions = dict(self._functions(units, site))
        for unit in units:
            if unit.is_segment:
                function, names = functions[unit]
                with name_scope(names):
                    results = function(*(env[v] for v in unit.inputs))
                env.update(zip(unit.outputs, results, strict=True))
            else:
                self._emit(unit.steps[0], env, site)
        return [_read(x, env) for x in graph.outputs]

    def _emit(
        self, step: Step, env: dict[Value, Any], site: Site, names: Sequence[Any] | None = None
    ) -> None:
        """Binds a step and adds its results to `env`.

        Args:
            step: The step.
            env: The array of each value that is computed so far.
            site: The place of the planned jaxpr in the program.
            names: The name stack of the step; None for its own.
        """
        roles = [x.role if isinstance(x, Value) else Role.PARAM for x in step.operands]
        stack = None if names is None else current_name_stack()
        with contextlib.ExitStack() as contexts:
            for eqn in (*step.around, step.eqn):
                contexts.enter_context(equation_context(eqn, stack))
            contexts.enter_context(name_scope(names or ()))
            arrays = [_read(x, env) for x in step.operands]
            scopes = (name for eqn in step.around for name in scope_names(eqn))
            called_at = site._replace(scope=(*site.scope, *scopes))
            results = self._bind(step.eqn, arrays, roles, called_at)
        env.update(zip(step.results, results, strict=True))

    def _functions(
        self, units: Sequence[Unit], site: Site
    ) -> Iterator[tuple[Unit, tuple[Callable[..., Any], tuple[Any, ...]]]]:
        """Yields each segment with its function and the name stack around the call."""
        for group, around, within in alike(units):
            # `prevent_cse` would put barriers around the segment. They are not needed: the loops of
            # the forward and of the backward pass are two computations, which XLA cannot merge.
            segment = self._segment(group[0], within, site)
            function = jax.checkpoint(segment, policy=_POLICY, prevent_cse=False)
            for unit, names in zip(group, around, strict=True):
                yield unit, (function, names)

    def _segment(
        self, unit: Unit, names: Sequence[Sequence[Any]], site: Site
    ) -> Callable[..., list[Any]]:
        def segment(*xs: Any) -> list[Any]:
            own = dict(zip(unit.inputs, xs, strict=True))
            for step, step_names in zip(unit.steps, names, strict=True):
                self._emit(step, own, site, step_names)
                for v in unit.saved.intersection(step.results):
                    own[v] = checkpoint_name(own[v], SAVED)
            return [own[v] for v in unit.outputs]

        return segment


def _read(atom: Atom, env: dict[Any, Any]) -> Any:
    return literal_value(atom) if isinstance(atom, Literal) else env[atom]


def _is_entered(eqn: JaxprEqn) -> bool:
    """Returns whether the bodies of an equation may be planned.

    A user's `jax.checkpoint` has a plan already, a ``while`` has no backward pass, and a function
    with its own derivative or batching rule is opaque.
    """
    name = eqn.primitive.name
    structure = STRUCTURES.get(name)
    if structure is None or structure.runs_again or name == "while":
        return False
    return name == "shard_map" or (structure.rebind is not None and not structure.has_rule)


def holds_loop(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a loop whose body may be planned, or contains one."""
    return _is_entered(eqn) and (
        eqn.primitive.name == "scan" or any(map(has_loop, (body.jaxpr for body in bodies(eqn))))
    )


def has_loop(jaxpr: AnyJaxpr) -> bool:
    """Returns whether a jaxpr contains a loop whose body may be planned.

    Args:
        jaxpr: The jaxpr, open or closed.
    """
    return any(holds_loop(eqn) for eqn in body_of(jaxpr).eqns)


def may_plan(closed: ClosedJaxpr, choice: ResidualChoice) -> bool:
    """Returns whether a program may have residuals to plan.

    Args:
        closed: Its jaxpr.
        choice: The user's choice.
    """
    return not choice.is_off and (not choice.loops_only or has_loop(closed))


def run_planned(
    closed: ClosedJaxpr, is_param: Sequence[bool], choice: ResidualChoice, arrays: Sequence[Any]
) -> list[Any]:
    """Runs a program with planned residuals.

    Args:
        closed: The jaxpr of the program.
        is_param: Whether each of its inputs is a parameter.
        choice: The user's choice.
        arrays: The array arguments.
    """
    if not may_plan(closed, choice):
        return as_function(closed)(*arrays)
    roles = [Role.PARAM if param else Role.STORED for param in is_param]
    return Emitter(choice).run(closed, arrays, roles, Site())
