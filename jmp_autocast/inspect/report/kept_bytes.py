"""What the backward pass of a program keeps, read from the jaxpr of `jax.vjp`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...interpreters.after.provenance import entering, follow, leaving
from ...interpreters.compat import (
    Literal,
    body_of,
    fresh_make_jaxpr,
    name_stack,
    without_dead_equations,
)
from ...interpreters.plan.float_dtypes import is_in
from ...interpreters.primitives.evaluate import of_positions
from ...interpreters.primitives.structure import bodies, equations_in
from ...interpreters.primitives.traits import having
from ...policies import FLOAT32
from .jaxprs import nbytes_of

# A parameter stays one through these: what the backward pass keeps of it is in memory anyway.
_MOVES = having("moves") | having("same") | {"convert_element_type", "source_view"}
# What follows the first operand are indices, a padding value, or the same source in 16 bits.
_FIRST = having("first")
_ZEROS = having("zeros")


class _Kind(enum.Enum):
    CONST = "const"  # made of constants alone
    PARAM = "param"  # a parameter, moved or cast
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class KeptBytes:
    """The bytes of activations that the backward pass keeps.

    Args:
        nbytes: All of them, None where they are not known.
        float32_nbytes: Those in float32, or float64 where that is the wide dtype.
        error: Why they are not known: what JAX, or a rule of the user's own, said.
    """

    nbytes: int | None = None
    float32_nbytes: int | None = None
    error: str = ""


def kept_bytes(
    program: Callable[..., Sequence[Any]],
    shapes: Sequence[Any],
    params: Sequence[int],
    wide: np.dtype = FLOAT32,
) -> KeptBytes:
    """Returns what `jax.vjp` of a program keeps.

    The derivative is that of all float outputs with respect to the parameters, or to all float
    inputs of a program without parameters. Each array counts once. Inputs of the program do not
    count, nor do 16-bit copies and movements of parameters, nor what is made of constants alone.
    8-bit copies do: they are kept beside the parameters. The
    numbers are those of the jaxpr: XLA may merge equal arrays, and compute cheap ones again.

    Args:
        program: From arrays to arrays.
        shapes: What it takes.
        params: The positions of its parameters.
        wide: The wide dtype of the policy.
    """
    floats = [i for i, x in enumerate(shapes) if jnp.issubdtype(x.dtype, jnp.floating)]
    wanted = [i for i in params if i in floats] or floats
    # A program without float inputs has no derivative, and keeps nothing.
    if not wanted:
        return KeptBytes()

    def kept(*arrays: Any) -> Any:
        def floats_of(*given: Any) -> list[Any]:
            return [x for x in program(*given) if jnp.issubdtype(x.dtype, jnp.floating)]

        of_wanted = of_positions(floats_of, arrays, wanted)
        outputs, pullback = jax.vjp(of_wanted, *(arrays[i] for i in wanted))
        # A program without a backward pass raises here: `jax.vjp` alone only linearizes it.
        pullback(outputs)
        return pullback

    try:
        jaxpr = body_of(fresh_make_jaxpr(kept, *shapes))
    except Exception as error:  # JAX, or a rule of the user's own, may refuse in any way
        return KeptBytes(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    # `jax.vjp` also computes the outputs. What they alone need is not kept.
    jaxpr = without_dead_equations(jaxpr)
    inputs = [_Kind.PARAM if i in params else _Kind.OTHER for i in range(len(shapes))]
    kept_arrays = zip(jaxpr.outvars, _kinds(jaxpr, inputs), strict=True)
    # A view of a source is its 16-bit copy: several views are one array.
    views: dict[Any, Any] = {eqn.outvars[0]: eqn.invars[1] for eqn in jaxpr.eqns if _is_view(eqn)}
    arrays = {views.get(v, v) for v, kind in kept_arrays if kind is _Kind.OTHER}
    arrays.difference_update(jaxpr.invars)
    full = sum(nbytes_of(v) for v in arrays if is_in(getattr(v.aval, "dtype", None), wide))
    return KeptBytes(sum(map(nbytes_of, arrays)), full)


def is_gradient(jaxpr: Any) -> bool:
    """True for a program that holds a backward pass: what it keeps is inside it.

    Args:
        jaxpr: An open or closed jaxpr.
    """
    return any("transpose(" in name_stack(eqn) for eqn, _ in equations_in(jaxpr))


def _is_view(eqn: Any) -> bool:
    return eqn.primitive.name == "source_view" and not isinstance(eqn.invars[1], Literal)


def _kinds(jaxpr: Any, inputs: Sequence[_Kind]) -> list[_Kind]:
    """Returns the kind of each output of a jaxpr."""

    def step(i: int, eqn: Any, given: list[_Kind]) -> list[_Kind]:
        held, count = bodies(eqn), len(eqn.outvars)
        if len(held) != 1:
            return [_of_equation(eqn, given)] * count
        (body,) = held
        made = _kinds(body.jaxpr, entering(body, given, _Kind.OTHER))
        return leaving(body, made, _Kind.OTHER, count)

    return follow(jaxpr, inputs, _Kind.CONST, step)


def _of_equation(eqn: Any, given: Sequence[_Kind]) -> _Kind:
    if all(kind is _Kind.CONST for kind in given) and not eqn.effects:
        return _Kind.CONST
    if eqn.primitive.name in _ZEROS:
        return _Kind.CONST  # XLA keeps nothing of them
    arrays = given[:1] if eqn.primitive.name in _FIRST else given
    moved = eqn.primitive.name in _MOVES and _Kind.OTHER not in arrays
    return _Kind.PARAM if moved else _Kind.OTHER
