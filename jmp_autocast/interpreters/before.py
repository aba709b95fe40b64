"""Prepares a jaxpr for planning, in two passes that depend on declared dtypes only.

**Integers and bools are cast** to floats before a product with floats: masks, one-hot rows, counts.
``jnp.matmul`` traces a product of int8 and float32 as one equation without a cast. JAX computes it
in float32, although matrix units multiply 16 bits. With the cast it is a product like any other,
with the same bits as ``one_hot(ids, n, dtype=jnp.int8).astype(jnp.float32) @ w``.

**Calls are inlined** if they lie between a gather and the producer of the array from which it picks
elements. A cross entropy reads one log-probability a row. The picked element of ``logits - max -
log(sum)`` is the picked element of ``logits``, less the maximum and the logarithm of its row: so
the plan picks first, then computes. A TPU stores the operand of a gather: 1.65 GB of float32
log-probabilities for 8 x 1024 tokens of a vocabulary of 50,257, half of the memory of a step of a
GPT with two layers. The plan decides which equations are in float32, and so which elements are
picked first: `plan/picked_first.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

from jax import lax

from ..policies import FLOAT_DTYPES
from .compat import (
    AnyJaxpr,
    JaxprEqn,
    Literal,
    aval_of,
    body_of,
    consts_of,
    variables_in,
    with_dtype,
)
from .compat.rebuilding import is_dropped, renamed, standing_in, variable, with_equations
from .primitives.picking import is_elementwise, picks
from .primitives.structure import bodies, called, is_plain_call, with_bodies
from .primitives.traits import having
from .regions import RegionOf, Regions

_CONTRACTS = having("contracts")


class Preparation:
    """Prepares the jaxprs of a program: one instance per trace.

    Args:
        regions: The regions of the program.
    """

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._prepared: dict[tuple[int, tuple[str, ...]], tuple[Any, Any]] = {}

    def __call__(self, jaxpr: AnyJaxpr, path: tuple[str, ...] = ()) -> Any:
        """Returns the jaxpr to plan, the same object if no pass changes it or its bodies.

        A jaxpr that is called 96 times in equal scopes is prepared once, and stays one object.

        Args:
            jaxpr: An open or closed jaxpr.
            path: The enclosing scopes.
        """
        key = id(jaxpr), path
        if key not in self._prepared:
            region_of = functools.partial(self._regions.at, path)
            eqns = [self._with_bodies(eqn, region_of) for eqn in body_of(jaxpr).eqns]
            made = numbers_cast(with_equations(jaxpr, eqns), region_of)
            # The jaxpr is kept alive with its result, so that no other jaxpr can get its id.
            self._prepared[key] = jaxpr, calls_at_picks(made, region_of)
        return self._prepared[key][1]

    def _with_bodies(self, eqn: JaxprEqn, region_of: RegionOf) -> Any:
        held = bodies(eqn)
        if not held or (region := region_of(eqn)).governed:
            return eqn
        prepared = [self(body.jaxpr, region.names) for body in held]
        is_same = all(a is body.jaxpr for a, body in zip(prepared, held, strict=True))
        return eqn if is_same else with_bodies(eqn, prepared)


def numbers_cast(jaxpr: AnyJaxpr, region_of: RegionOf) -> Any:
    """Returns a jaxpr in which a product of a float and an integer has two float operands.

    Args:
        jaxpr: An open or closed jaxpr.
        region_of: Returns the region of an equation.
    """
    casts: dict[Any, Any] = {}
    eqns: list[Any] = []
    for eqn in body_of(jaxpr).eqns:
        i = _number(eqn)
        if i is not None and region_of(eqn).may_change(eqn.primitive.name):
            number, dtype = eqn.invars[i], aval_of(eqn.outvars[0]).dtype
            if (number, dtype) not in casts:
                made = casts[number, dtype] = variable(with_dtype(number.aval, dtype))
                params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
                cast = eqn.replace(primitive=lax.convert_element_type_p, params=params)
                eqns.append(cast.replace(invars=[number], outvars=[made]))
            operands = list(eqn.invars)
            operands[i] = casts[number, dtype]
            eqn = eqn.replace(invars=operands)
        eqns.append(eqn)
    return with_equations(jaxpr, eqns)


def _number(eqn: JaxprEqn) -> int | None:
    """Returns the position of the integer or bool in a product with a float, None without one."""
    if eqn.primitive.name not in _CONTRACTS:
        return None
    *operands, result = [aval_of(v).dtype for v in (*eqn.invars[:2], eqn.outvars[0])]
    is_number = [dtype.kind in "biu" for dtype in operands]
    is_mixed = result in operands and result in FLOAT_DTYPES and any(is_number)
    return is_number.index(True) if is_mixed else None


def calls_at_picks(jaxpr: AnyJaxpr, region_of: RegionOf) -> Any:
    """Inlines the calls between a gather of few elements and the producer of its operand.

    Args:
        jaxpr: An open or closed jaxpr. The jaxprs in its equations are already prepared.
        region_of: Returns the region of an equation.
    """
    eqns = body_of(jaxpr).eqns
    behind = _values_behind(eqns)
    found = {
        k
        for k, eqn in enumerate(eqns)
        if is_plain_call(eqn)
        and (not behind.isdisjoint(eqn.outvars) or _picks_an_operand(eqn))
        and not (eqn.effects or consts_of(called(eqn)))
        and region_of(eqn).may_change(eqn.primitive.name)
    }
    return calls_at_picks(_inlined(jaxpr, found), region_of) if found else jaxpr


def _picks_an_operand(call: JaxprEqn) -> bool:
    """Whether the body of a call picks from a value that is computed outside.

    If the gather stayed in the call, the whole outer value and its gradient would be stored.
    """
    inner = body_of(called(call))
    return not _values_behind(inner.eqns).isdisjoint(inner.invars)


def _values_behind(eqns: Sequence[JaxprEqn]) -> set[Any]:
    """Returns the arrays with picked elements, and those from which they are computed."""
    behind: set[Any] = set()
    for eqn in reversed(eqns):
        if picks(eqn):
            behind.add(eqn.invars[0])
        elif is_elementwise(eqn) and eqn.outvars[0] in behind:
            shape = aval_of(eqn.outvars[0]).shape
            behind.update(v for v in variables_in(eqn.invars) if aval_of(v).shape == shape)
    return behind


def _inlined(jaxpr: AnyJaxpr, calls: Collection[int]) -> Any:
    """Returns a jaxpr in which the calls at some positions are replaced by their equations."""
    body = body_of(jaxpr)
    made = {v for eqn in body.eqns for v in eqn.outvars}
    names: dict[Any, Any] = {}
    eqns: list[Any] = []
    for k, eqn in enumerate(body.eqns):
        operands = renamed(eqn.invars, names)
        if k not in calls:
            eqns.append(eqn.replace(invars=operands))
            continue
        inner = body_of(called(eqn))
        inside = dict(zip(inner.invars, operands, strict=True))
        # A user's derivative rule may close over variables of the jaxpr. So the results of a call
        # keep their variables, and so do the values in its body, unless it is inlined twice.
        for out, v in zip(eqn.outvars, inner.outvars, strict=True):
            if not isinstance(v, Literal) and v not in inside and not is_dropped(out):
                inside[v] = out
        for e in inner.eqns:
            again = made.intersection(e.outvars).difference(inside)
            inside.update((v, variable(v.aval)) for v in again)
            made.update(e.outvars)
            results = renamed(e.outvars, inside)
            eqns.append(standing_in(eqn, e, renamed(e.invars, inside), results))
        names.update(zip(eqn.outvars, renamed(inner.outvars, inside), strict=True))
    return with_equations(jaxpr, eqns, renamed(body.outvars, names))
