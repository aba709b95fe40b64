"""Reading jaxprs: what is inside an equation, which values only move parameters or gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jmp_autocast.interpreters.compat import Literal, name_stack, without_dead_equations
from jmp_autocast.interpreters.primitives.structure import bodies
from jmp_autocast.interpreters.primitives.traits import having

# They move, replicate or cast elements, and compute nothing.
MOVES = having("moves") | having("same") | having("first")
MOVES |= {"concatenate", "convert_element_type"}
# What their transposes do: a gradient is added up where its parameter was replicated or indexed.
_SUMS = frozenset(("add_any", "add", "dynamic_update_slice", "reduce_sum", "scatter-add"))

FLOATS = ("float32", "bfloat16", "float16")


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr of an open or closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def live(closed: Any) -> Any:
    """Returns the open jaxpr without the equations that nothing reads."""
    return without_dead_equations(open_jaxpr(closed))


class Held(NamedTuple):
    """A jaxpr that an equation holds.

    Args:
        jaxpr: The open jaxpr.
        operands: The operands of the equation, one for each input of the jaxpr.
        results: The results of the equation, one for each output; none for a predicate.
        carries: Pairs (input, output) that a loop carries.
        fixed: How many inputs at the front are the same in each iteration.
        times: How often it runs; a ``while``, of which nobody knows, once.
    """

    jaxpr: Any
    operands: Sequence[Any]
    results: Sequence[Any]
    carries: Sequence[tuple[int, int]] = ()
    fixed: int = 0
    times: int = 1


def inside(eqn: Any) -> Iterator[Held]:
    """Yields each jaxpr that an equation holds."""
    if eqn.primitive.name == "accumulate":  # a contraction, whose sources stand behind its operands
        inner = open_jaxpr(eqn.params["jaxpr"])
        yield Held(inner, eqn.invars[: len(inner.invars)], eqn.outvars)
    for body in bodies(eqn):
        operands = [eqn.invars[k] for k in body.operands]
        results = [eqn.outvars[k] for k in body.results if k is not None]
        jaxpr = open_jaxpr(body.jaxpr)
        yield Held(jaxpr, operands, results, body.carries, body.fixed, body.repeats)


def of_parameters(jaxpr: Any, inputs: Sequence[bool]) -> set[Any]:
    """Returns the variables that are parameters, or only move or cast parameters.

    Args:
        jaxpr: An open jaxpr.
        inputs: Which of its inputs are.
    """
    found = {v for v, is_one in zip(jaxpr.invars, inputs, strict=True) if is_one}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        held = list(inside(eqn))
        for each in held:
            within = of_parameters(each.jaxpr, inner_parameters(each, found))
            outputs = zip(each.results, each.jaxpr.outvars, strict=False)
            found.update(r for r, v in outputs if is_in(v, within))
        arrays = [v for v in eqn.invars if not isinstance(v, Literal)]
        if name in having("first"):
            arrays = arrays[:1]  # the others are indices, a padding value, a copy of the first
        if not held and name in MOVES and arrays and all(v in found for v in arrays):
            found.update(eqn.outvars)
    return found


def inner_parameters(held: Held, found: set[Any]) -> list[bool]:
    """Returns which inputs of a jaxpr inside an equation are parameters; no carry stays one."""
    carried = {i for i, _ in held.carries}
    return [i not in carried and is_in(v, found) for i, v in enumerate(held.operands)]


def to_gradients(jaxpr: Any, outputs: Sequence[bool]) -> dict[Any, bool]:
    """Returns, for each variable, whether it only reaches gradients of parameters.

    Args:
        jaxpr: An open jaxpr.
        outputs: Which of its outputs are gradients of parameters, or only reach them, by moves,
            casts and sums.
    """
    flows: dict[Any, bool] = {}

    def use(atom: Any, reaches: bool) -> None:
        if not isinstance(atom, Literal):
            flows[atom] = flows.get(atom, True) and reaches

    for v, reaches in zip(jaxpr.outvars, outputs, strict=True):
        use(v, reaches)
    for eqn in reversed(jaxpr.eqns):
        held = list(inside(eqn))
        for each in held:
            within = to_gradients(each.jaxpr, inner_gradients(each, flows))
            for atom, v in zip(each.operands, each.jaxpr.invars, strict=True):
                use(atom, within.get(v, True))
        if not held:
            moved = eqn.primitive.name in MOVES | _SUMS
            reaches = moved and all(flows.get(v, True) for v in eqn.outvars)
            for atom in eqn.invars:
                use(atom, reaches)
    return flows


def inner_gradients(held: Held, flows: dict[Any, bool]) -> list[bool]:
    """Returns which outputs of a jaxpr inside an equation only reach gradients."""
    inputs, count = held.jaxpr.invars, len(held.jaxpr.outvars)
    flags = [flows.get(v, False) for v in held.results] or [False] * count
    while held.carries:  # a carry also reaches what the next step makes of it
        within = to_gradients(held.jaxpr, flags)
        stable = list(flags)
        for i, output in held.carries:
            stable[output] = flags[output] and within.get(inputs[i], True)
        if stable == flags:
            break
        flags = stable
    return flags


def is_in(atom: Any, variables: Any) -> bool:
    """Returns whether an atom is a variable among ``variables``."""
    return not isinstance(atom, Literal) and atom in variables


def nbytes_of(aval: Any) -> int:
    """Returns the bytes of an array, 0 for what is no array of numbers (a random key)."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * dtype.itemsize


def scope_of(eqn: Any) -> str:
    """Returns the named scopes around an equation, such as ``Gpt/Block_0``, and its direction."""
    names = name_stack(eqn)
    direction = " (backward)" if "transpose(" in names else ""
    names = re.sub(r"autocast\[\w+\]|(transpose|jvp|vmap)\(|\)", "", names)
    return "/".join(filter(None, names.split("/"))) + direction
