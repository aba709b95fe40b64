"""What a gradient program casts, and in which dtypes its dots and convolutions read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .flow import (
    FLOATS,
    inner_gradients,
    inner_parameters,
    inside,
    is_in,
    live,
    nbytes_of,
    of_parameters,
    scope_of,
    to_gradients,
)

_DOTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class Cast:
    """One cast between float dtypes.

    Args:
        kind: ``"activation"``, ``"parameter"`` (of a parameter or its rows, before anything is
            computed from it) or ``"gradient"`` (of what is then only added up to a parameter's
            gradient).
        what: Its dtypes and shape.
        where: Its scope.
        nbytes: The bytes of its operand and its result, times the steps of the loops around it.
    """

    kind: str
    what: str
    where: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Dot:
    """One matrix product or convolution: operand dtypes, and FLOPs with loops multiplied."""

    dtypes: tuple[str, str]
    flops: int


def casts_and_dots(closed: Any, parameters: int, gradients: int) -> tuple[list[Cast], list[Dot]]:
    """Reads a gradient program.

    Args:
        closed: Its jaxpr.
        parameters: The number of inputs that are parameters, the first ones.
        gradients: The number of outputs that are their gradients, the last ones.

    Returns:
        Its casts and its dots, those inside other equations too. A loop's are listed once.
    """
    jaxpr = live(closed)
    inputs = [i < parameters for i in range(len(jaxpr.invars))]
    outputs = [i >= len(jaxpr.outvars) - gradients for i in range(len(jaxpr.outvars))]
    found = list(_read(jaxpr, inputs, outputs, 1, ""))
    casts = [x for x in found if isinstance(x, Cast)]
    return casts, [x for x in found if isinstance(x, Dot)]


def _read(
    jaxpr: Any, inputs: Sequence[bool], outputs: Sequence[bool], times: int, scope: str
) -> Iterator[Cast | Dot]:
    parameters, gradients = of_parameters(jaxpr, inputs), to_gradients(jaxpr, outputs)
    for eqn in jaxpr.eqns:
        here = "/".join(filter(None, (scope, scope_of(eqn))))
        for held in inside(eqn):
            of_params = inner_parameters(held, parameters)
            to_grads = inner_gradients(held, gradients)
            yield from _read(held.jaxpr, of_params, to_grads, times * held.times, here)
        if eqn.primitive.name in _DOTS:
            yield Dot(_dtypes(eqn), times * _flops(eqn))
        if eqn.primitive.name == "convert_element_type":
            source, target = eqn.invars[0].aval, eqn.outvars[0].aval
            names = (source.dtype.name, target.dtype.name)
            if names[0] == names[1] or not all(name in FLOATS for name in names):
                continue
            if is_in(eqn.invars[0], parameters):
                kind = "parameter"
            else:
                kind = "gradient" if gradients.get(eqn.outvars[0]) else "activation"
            what = f"{names[0]} to {names[1]} {list(source.shape)}"
            yield Cast(kind, what, here, times * (nbytes_of(source) + nbytes_of(target)))


def _dtypes(eqn: Any) -> tuple[str, str]:
    lhs, rhs = eqn.invars[:2]
    return lhs.aval.dtype.name, rhs.aval.dtype.name


def _flops(eqn: Any) -> int:
    """Two per multiplication and addition, holes of dilated convolutions included."""
    lhs, rhs, out = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * math.prod(out) * math.prod(lhs[i] for i in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        out_features = rhs[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(out) * math.prod(rhs) // out_features
    return 2 * math.prod(lhs) * rhs[-1]


def low_share(dots: Sequence[Dot]) -> float:
    """Returns the share of the FLOPs whose operands are both in 16 bits."""
    low = sum(d.flops for d in dots if all(name.endswith("16") for name in d.dtypes))
    return low / (sum(d.flops for d in dots) or 1)


def mixed(dots: Sequence[Dot]) -> int:
    """Returns the number of dots whose operands have different dtypes."""
    return sum(len(set(d.dtypes)) > 1 for d in dots)


def converts_in_hlo(text: str) -> int:
    """Returns the number of convert instructions of an HLO program, those in fusions too."""
    return len(re.findall(r"= \S+ convert\(", text))
