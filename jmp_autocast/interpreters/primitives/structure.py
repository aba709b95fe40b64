"""The jaxprs that an equation holds: one description for each higher-order primitive.

Planning, rewriting, `explain`, residual counts, `check_numerics`, `compare`, `tune` and the
benchmarks all read these descriptions. Only this module knows how JAX stores jaxprs in parameters.
To add a higher-order primitive, describe it here. If its description has no ``rebind``, the
primitive also needs a rewriting rule in `interpreters/rewrite/structural.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..compat import (
    AnyJaxpr,
    JaxprEqn,
    assumed_size,
    body_of,
    call_with_operands,
    has_no_options,
    inner_jaxpr_key,
    open_jaxpr,
    scan_split,
    scan_with_more,
    shard_map_axes,
)
from ..compat.same_rules import rule_key

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A jaxpr that an equation holds, and its relation to the equation.

    Args:
        jaxpr: The jaxpr, open or closed.
        operands: For each input of the jaxpr, the position of the equation's operand that provides
            it: as a whole, in slices, or as the initial value of a carry.
        results: For each output of the jaxpr, the position of the equation's result that it
            becomes; None for the predicate of a loop.
        carries: Pairs (input, output) of the jaxpr: the output of one iteration is the input of the
            next. Empty for a body that runs once.
        fixed: The number of leading inputs that are the same in each iteration, which are neither
            carries nor slices.
        repeats: How often the jaxpr runs when the equation runs once. It is 1 for a ``while``,
            whose count is unknown, and `assumed_size` for a ``scan`` over a symbolic length.
        takes_copies_at: The position among the jaxpr's inputs at which copies of the inputs before
            it are inserted. Copies of the inputs after it, which are slices, are appended.
    """

    jaxpr: AnyJaxpr
    operands: tuple[int, ...]
    results: tuple[int | None, ...]
    carries: tuple[tuple[int, int], ...] = ()
    fixed: int = 0
    repeats: int = 1
    takes_copies_at: int = 0

    @property
    def carried(self) -> frozenset[int]:
        """The inputs that differ between iterations and are not slices."""
        if self.carries or None not in self.results:
            return frozenset(i for i, _ in self.carries)
        return frozenset(range(self.fixed, len(self.operands)))  # a loop's predicate


class Copy(NamedTuple):
    """A 16-bit copy of an operand, which a body takes as an additional input.

    Args:
        operand: The position of the operand that is copied.
        array: The copy.
    """

    operand: int
    array: Any


_Arrays: TypeAlias = Sequence[Any]
_Jaxprs: TypeAlias = Sequence[AnyJaxpr]
_Copies: TypeAlias = Sequence[Sequence[Copy]]
_Bound: TypeAlias = tuple[list[Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """How a higher-order primitive holds its jaxprs.

    Args:
        bodies: Returns the bodies of an equation.
        rebind: Returns operands and parameters for a new equation. It takes an equation, its
            operands, a jaxpr for each body, and the copies that each jaxpr takes. None for a
            primitive that cannot be bound with other jaxprs.
        is_call: Whether it runs its one body on its operands and returns the body's results.
        isolates: Whether its body is traced or sharded apart from the program around it. A source,
            such as a parameter, may then enter the body as a 16-bit cast, but not in another
            encoding such as float8.
        has_rule: Whether it has a derivative rule of the user.
        runs_again: Whether a backward pass runs its body again: a checkpoint.
    """

    bodies: Callable[[Any], tuple[Body, ...]]
    rebind: Callable[[JaxprEqn, _Arrays, _Jaxprs, _Copies], _Bound] | None = None
    is_call: bool = False
    isolates: bool = False
    has_rule: bool = False
    runs_again: bool = False


STRUCTURES: dict[str, Structure] = {}
"""The description of each higher-order primitive, by its name."""

_ORDINARY = Structure(lambda eqn: ())


def bodies(eqn: JaxprEqn) -> tuple[Body, ...]:
    """Returns the bodies of an equation, in the order of `EquationPlan.inner`; () if it has none.

    The scalar jaxprs of scatters and reductions are not bodies: they select an operation, like an
    enum.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> loop = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x))
        >>> (body,) = bodies(loop(jnp.ones(3)).eqns[-1])
        >>> body.carries, body.repeats
        (((0, 0),), 3)
    """
    structure = STRUCTURES.get(eqn.primitive.name)
    return () if structure is None else structure.bodies(eqn)


def _structure_of(eqn: JaxprEqn) -> Structure:
    return STRUCTURES.get(eqn.primitive.name, _ORDINARY)


def is_call(eqn: JaxprEqn) -> bool:
    """Returns whether an equation runs its one body on its operands, as a function call does."""
    return _structure_of(eqn).is_call


def is_plain_call(eqn: JaxprEqn) -> bool:
    """Returns whether a call may be inlined."""
    name = eqn.primitive.name
    return name in ("closed_call", "core_call") or (name == "jit" and has_no_options(eqn.params))


def has_rule(eqn: JaxprEqn) -> bool:
    """Returns whether an equation has a derivative rule of the user."""
    return _structure_of(eqn).has_rule


def runs_again(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a checkpoint: a backward pass runs its body again."""
    return _structure_of(eqn).runs_again


def holds_rules(eqn: JaxprEqn) -> bool:
    """Returns whether an equation has a derivative or batching rule of the user."""
    return has_rule(eqn) or eqn.primitive.name == "custom_vmap_call"


def rule_of(eqn: JaxprEqn) -> tuple[Hashable, list[Any]]:
    """Returns a key that is equal for calls of one custom function, whatever jaxprs they hold.

    Args:
        eqn: An equation that holds rules.

    Returns:
        The key, and the objects in it that are not from JAX's library: the user's own rules.
    """
    params, own = {k: v for k, v in eqn.params.items() if k != _key(eqn)}, []
    return (eqn.primitive.name, *params, *[rule_key(rule, own) for rule in params.values()]), own


def isolates(eqn: JaxprEqn) -> bool:
    """Returns whether an equation's body is traced or sharded apart; see `Structure.isolates`."""
    return _structure_of(eqn).isolates


def rebound(eqn: JaxprEqn, operands: _Arrays, jaxprs: _Jaxprs, copies: _Copies) -> _Bound:
    """Returns operands and parameters that bind an equation with other jaxprs.

    Args:
        eqn: The equation.
        operands: Its operands.
        jaxprs: The new jaxpr of each body.
        copies: For each body, the copies that its new jaxpr takes at ``Body.takes_copies_at``.
    """
    rebind = STRUCTURES[eqn.primitive.name].rebind
    if rebind is None:
        raise AssertionError(f"{eqn.primitive.name} is not bound with other jaxprs")
    return rebind(eqn, operands, jaxprs, copies)


def with_bodies(eqn: JaxprEqn, jaxprs: _Jaxprs) -> JaxprEqn:
    """Returns an equation with other jaxprs of the same types as its bodies."""
    structure = STRUCTURES[eqn.primitive.name]
    if structure.rebind is None:
        (jaxpr,) = jaxprs
        return eqn.replace(params={**eqn.params, _key(eqn): jaxpr})
    _, params = structure.rebind(eqn, eqn.invars, jaxprs, [()] * len(jaxprs))
    return eqn.replace(params=params)


# --- calls ----------------------------------------------------------------------------------


def called(eqn: JaxprEqn) -> Any:
    """Returns the jaxpr that a call holds."""
    return eqn.params[_key(eqn)]


def _key(eqn: JaxprEqn) -> str:
    is_vmap = eqn.primitive.name == "custom_vmap_call"
    return "call" if is_vmap else inner_jaxpr_key(eqn.params)


def _call_bodies(eqn: JaxprEqn) -> tuple[Body, ...]:
    operands, results = tuple(range(len(eqn.invars))), tuple(range(len(eqn.outvars)))
    return (Body(called(eqn), operands, results, takes_copies_at=len(operands)),)


def _rebind_call(eqn: JaxprEqn, operands: _Arrays, jaxprs: _Jaxprs, copies: _Copies) -> _Bound:
    (jaxpr,), (more,) = jaxprs, copies
    # Each new operand is a copy of an old operand: it gets the same sharding, and is not donated.
    params = call_with_operands(eqn.params, [copy.operand for copy in more])
    # A checkpoint takes an open jaxpr. `open_jaxpr` raises if the new jaxpr has constants.
    params[_key(eqn)] = open_jaxpr(jaxpr) if runs_again(eqn) else jaxpr
    return [*operands, *(copy.array for copy in more)], params


_CALL = Structure(_call_bodies, _rebind_call, is_call=True)
STRUCTURES.update(
    dict.fromkeys(
        "jit closed_call core_call call eval_jaxpr compute_on xla_metadata_call".split(), _CALL
    )
)
_CHECKPOINT = dataclasses.replace(_CALL, runs_again=True)
STRUCTURES.update(dict.fromkeys(("remat2", "checkpoint"), _CHECKPOINT))
# `remat_opt` is the forward rule of a `custom_vjp` with `optimize_remat`. Its equation also holds
# the function without residuals, which JAX may run instead. Another jaxpr would not change this
# function, so the equation is inlined and never bound with another jaxpr.
STRUCTURES["remat_opt"] = dataclasses.replace(_CHECKPOINT, rebind=None)
STRUCTURES["custom_jvp_call"] = Structure(_call_bodies, is_call=True, has_rule=True)
STRUCTURES["custom_vjp_call"] = Structure(_call_bodies, is_call=True, has_rule=True)
STRUCTURES["custom_vmap_call"] = Structure(_call_bodies, is_call=True, isolates=True)


# --- branches -------------------------------------------------------------------------------


def _cond_bodies(eqn: JaxprEqn) -> tuple[Body, ...]:
    """Returns the branches. Operand 0 is the index of the branch; each branch takes the rest."""
    rest = tuple(range(1, len(eqn.invars)))
    results = tuple(range(len(eqn.outvars)))
    return tuple(
        Body(branch, rest, results, takes_copies_at=len(rest)) for branch in eqn.params["branches"]
    )


def _rebind_cond(eqn: JaxprEqn, operands: _Arrays, jaxprs: _Jaxprs, copies: _Copies) -> _Bound:
    # Unlike a loop, a cond has one list of operands for all its bodies.
    more = [copy.array for copy in copies[0]]  # the copies are the same for all branches
    return [*operands, *more], {**eqn.params, "branches": tuple(jaxprs)}


STRUCTURES["cond"] = Structure(_cond_bodies, _rebind_cond)


# --- loops ----------------------------------------------------------------------------------


def _iterated(
    jaxpr: AnyJaxpr, operands: Iterable[int], results: Iterable[int | None], fixed: int, count: int
) -> Body:
    """Returns the body of a loop, with ``fixed`` constants first and ``count`` carries next."""
    carries = tuple((fixed + k, k) for k in range(count))
    return Body(jaxpr, tuple(operands), tuple(results), carries, fixed, takes_copies_at=fixed)


def _scan_bodies(eqn: JaxprEqn) -> tuple[Body, ...]:
    """Returns the body. Inputs: constants, carries, slices. Outputs: carries, slices to stack."""
    operands, results = range(len(eqn.invars)), range(len(eqn.outvars))
    body = _iterated(eqn.params["jaxpr"], operands, results, *scan_split(eqn.params))
    return (dataclasses.replace(body, repeats=assumed_size(eqn.params["length"])),)


def _rebind_scan(eqn: JaxprEqn, operands: _Arrays, jaxprs: _Jaxprs, copies: _Copies) -> _Bound:
    consts, _ = scan_split(eqn.params)
    (jaxpr,), (more,) = jaxprs, copies
    fixed = [copy.array for copy in more if copy.operand < consts]
    scanned = [copy.array for copy in more if copy.operand >= consts]
    params = scan_with_more({**eqn.params, "jaxpr": jaxpr}, len(fixed), len(scanned))
    return [*operands[:consts], *fixed, *operands[consts:], *scanned], params


STRUCTURES["scan"] = Structure(_scan_bodies, _rebind_scan)


def scan_direction(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the options that give `jax.lax.scan` the length and direction of an equation."""
    return {"length": eqn.params["length"], "reverse": eqn.params["reverse"]}


def _while_bodies(eqn: JaxprEqn) -> tuple[Body, ...]:
    """Returns the bodies. Operands: constants of the condition, constants of the body, carries."""
    conds, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    start = conds + consts
    carries = range(start, len(eqn.invars))
    cond, body, count = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"], len(carries)
    return (
        _iterated(cond, (*range(conds), *carries), (None,), conds, 0),
        _iterated(body, (*range(conds, start), *carries), range(count), consts, count),
    )


def _rebind_while(eqn: JaxprEqn, operands: _Arrays, jaxprs: _Jaxprs, copies: _Copies) -> _Bound:
    # Each body has its own constants at the front; the carries follow, and both bodies take them.
    params, bound, first = dict(eqn.params), [], 0
    for part, jaxpr, more in zip(("cond", "body"), jaxprs, copies, strict=True):
        count = params[f"{part}_nconsts"]
        bound += [*operands[first : first + count], *(copy.array for copy in more)]
        params |= {f"{part}_jaxpr": jaxpr, f"{part}_nconsts": count + len(more)}
        first += count
    return [*bound, *operands[first:]], params


STRUCTURES["while"] = Structure(_while_bodies, _rebind_while)


# --- device maps ----------------------------------------------------------------------------


STRUCTURES["shard_map"] = Structure(_call_bodies, isolates=True)


def shard_map_options(eqn: JaxprEqn, more: Sequence[int] = ()) -> dict[str, Any]:
    """Returns the options with which `jax.shard_map` maps over the mesh axes of an equation.

    Args:
        eqn: The equation.
        more: The positions of the operands whose copies are appended to the operands.
    """
    params, specs = eqn.params, eqn.params["in_specs"]
    return {
        "mesh": params["mesh"],
        "in_specs": (*specs, *(specs[i] for i in more)),
        "out_specs": tuple(params["out_specs"]),
        "check_vma": params["check_vma"],
        "axis_names": shard_map_axes(params),
    }


# --- walking --------------------------------------------------------------------------------


def innermost_first(root: T, inside: Callable[[T], Sequence[T]]) -> list[tuple[T, int]]:
    """Returns a tree in post-order: each node after its children, the root last.

    It does not recurse, so the tree may be deeper than Python's stack.

    Args:
        root: A jaxpr, or the plan of one.
        inside: Returns the children of a node.

    Returns:
        Pairs (node, its height).
    """
    levels: dict[int, int] = {}
    found: list[tuple[T, int]] = []
    waiting = [root]
    while waiting:
        held = inside(waiting[-1])
        if missing := [x for x in held if id(x) not in levels]:
            waiting += missing
        elif id(done := waiting.pop()) not in levels:
            levels[id(done)] = 1 + max([levels[id(x)] for x in held], default=0)
            found.append((done, levels[id(done)]))
    return found


def equations_in(
    jaxpr: AnyJaxpr, times: int = 1, inside: Callable[[Any], tuple[Body, ...]] = bodies
) -> Iterator[tuple[Any, int]]:
    """Yields each equation of a jaxpr, at any depth, and how often it runs.

    The body of a ``while`` counts once, because its number of iterations is unknown.

    Args:
        jaxpr: An open or closed jaxpr.
        times: How often the jaxpr runs.
        inside: Returns the bodies of an equation.
    """
    for eqn in body_of(jaxpr).eqns:
        yield eqn, times
        for body in inside(eqn):
            yield from equations_in(body.jaxpr, times * body.repeats, inside)
