"""Reading jaxprs: what is inside an equation, which values only move parameters or gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jmp_autocast.interpreters.compat import Literal, dce_jaxpr, name_stack, scan_split

# They move, replicate or cast elements, and compute nothing.
MOVES = frozenset(
    """
    reshape transpose broadcast_in_dim squeeze slice dynamic_slice rev concatenate pad split copy
    copy_p convert_element_type stop_gradient source_view cpu_barrier optimization_barrier gather
    """.split()
)
# What their transposes do: a gradient is added up where its parameter was replicated or indexed.
_SUMS = frozenset(("add_any", "add", "dynamic_update_slice", "reduce_sum", "scatter-add"))

FLOATS = ("float32", "bfloat16", "float16")


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr of an open or closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def live(closed: Any) -> Any:
    """Returns the open jaxpr without the equations that nothing reads."""
    jaxpr = open_jaxpr(closed)
    used = [True] * len(jaxpr.outvars)
    return dce_jaxpr(jaxpr, used, instantiate=True)[0]


def inside(eqn: Any) -> Iterator[tuple[Any, Sequence[Any], Sequence[Any], int]]:
    """Yields each jaxpr that an equation holds, its operands, its results, and how often it runs.

    Operands and results are the equation's, one for each input and output of the jaxpr. How often a
    ``while`` runs is unknown: once.
    """
    params = eqn.params
    if eqn.primitive.name == "cond":
        for branch in params["branches"]:
            yield open_jaxpr(branch), eqn.invars[1:], eqn.outvars, 1
    elif eqn.primitive.name == "while":
        conds, bodies = params["cond_nconsts"], params["body_nconsts"]
        carry = eqn.invars[conds + bodies :]
        yield open_jaxpr(params["cond_jaxpr"]), [*eqn.invars[:conds], *carry], [], 1
        body = [*eqn.invars[conds : conds + bodies], *carry]
        yield open_jaxpr(params["body_jaxpr"]), body, eqn.outvars, 1
    else:
        times = params["length"] if eqn.primitive.name == "scan" else 1
        for key in ("jaxpr", "call_jaxpr"):
            if hasattr(open_jaxpr(params.get(key)), "eqns"):
                inner = open_jaxpr(params[key])
                # A contraction that accumulates has the leaves behind its operands as well.
                yield inner, eqn.invars[: len(inner.invars)], eqn.outvars, times


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
        for inner, operands, results, _ in held:
            flags = inner_parameters(eqn, operands, found)
            within = of_parameters(inner, flags)
            found.update(
                r for r, v in zip(results, inner.outvars, strict=False) if is_in(v, within)
            )
        arrays = [v for v in eqn.invars if not isinstance(v, Literal)]
        if name in ("dynamic_slice", "gather", "pad", "source_view"):
            arrays = arrays[:1]  # the others are indices, a padding value, the same leaf in 16 bits
        if not held and name in MOVES and arrays and all(v in found for v in arrays):
            found.update(eqn.outvars)
    return found


def inner_parameters(eqn: Any, operands: Sequence[Any], found: set[Any]) -> list[bool]:
    """Returns which inputs of the jaxpr inside an equation are parameters."""
    flags = [is_in(v, found) for v in operands]
    if eqn.primitive.name == "scan":
        consts, carries = scan_split(eqn.params)
        flags[consts : consts + carries] = [False] * carries
    return flags


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
        for inner, operands, results, _ in held:
            within = to_gradients(inner, inner_gradients(eqn, inner, results, flows))
            for atom, v in zip(operands, inner.invars, strict=True):
                use(atom, within.get(v, True))
        if not held:
            moved = eqn.primitive.name in MOVES | _SUMS
            reaches = moved and all(flows.get(v, True) for v in eqn.outvars)
            for atom in eqn.invars:
                use(atom, reaches)
    return flows


def inner_gradients(
    eqn: Any, inner: Any, results: Sequence[Any], flows: dict[Any, bool]
) -> list[bool]:
    """Returns which outputs of the jaxpr inside an equation only reach gradients."""
    flags = [flows.get(v, False) for v in results] or [False] * len(inner.outvars)
    if eqn.primitive.name == "scan":
        consts, carries = scan_split(eqn.params)
        while True:  # a carry also reaches what the next step makes of it
            within = to_gradients(inner, flags)
            carried = inner.invars[consts : consts + carries]
            stable = [f and within.get(v, True) for f, v in zip(flags, carried, strict=False)]
            if stable == flags[:carries]:
                break
            flags[:carries] = stable
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
