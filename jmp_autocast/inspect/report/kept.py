"""The residuals of a program: the arrays that it keeps for its backward pass."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from ...interpreters import compat
from ...interpreters.compat import AnyJaxpr, JaxprEqn, Literal, name_stack
from ...interpreters.plan.reads import entering, follow, leaving
from ...interpreters.primitives.evaluate import of_positions
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.structure import bodies, equations_in
from ...interpreters.primitives.traits import having
from ...policies import COMPUTE_DTYPES, FLOAT32
from ..measure.measured import user_scopes
from .jaxprs import nbytes_of


@dataclasses.dataclass(frozen=True)
class KeptRow:
    """The arrays of one dtype, producer and scope that a program keeps for its backward pass.

    Args:
        dtype: The dtype of the arrays.
        primitive: The primitive that computes them; ``""`` for the carry of a loop.
        scope: The scopes of the primitive, joined by ``/``, with ``*`` for numbers, so that equal
            layers are one row.
        arrays: The number of arrays. The values of all iterations of a ``scan`` are one array.
        nbytes: The bytes of the arrays.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> def loss(w, x):
        ...     with jax.named_scope("layer_0"):
        ...         return jnp.sin(x @ w)
        >>> rows = explain(loss, jnp.ones((8, 8)), jnp.ones((4, 8)), policy=BF16).kept
        >>> [(row.dtype, row.primitive, row.scope, row.nbytes) for row in rows]
        [('bfloat16', 'convert_element_type', 'layer_*', 192), ('float32', 'cos', 'layer_*', 128)]
    """

    dtype: str
    primitive: str
    scope: str
    arrays: int
    nbytes: int


# These primitives move or cast an array. A moved or cast parameter does not count as a residual,
# because the parameter is in memory anyway.
_MOVES = having("moves") | having("same") | {"convert_element_type", "source_view"}
# The first operand of these primitives decides the `_Kind` of the result. Their other operands are
# indices, a padding value, or the 16-bit copy of the first operand.
_FIRST = having("first")
_ZEROS = having("zeros")


class _Kind(enum.Enum):
    CONST = "const"  # computed from constants alone
    PARAM = "param"  # a parameter, moved or cast
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class KeptBytes:
    """The bytes of the residuals of a program, without parameters.

    Args:
        nbytes: The bytes of all residuals, None if they are unknown.
        float32_nbytes: The bytes of the residuals in float32.
        uncast_nbytes: The bytes that the residuals would have in float32 without casts. A 16-bit
            copy counts as the array that it copies; a copy of an input does not count.
        error: The error of JAX, or of a derivative rule of the user, if the residuals are unknown.
        rows: The residuals by dtype, primitive and scope, the most bytes first.
    """

    nbytes: int | None = None
    float32_nbytes: int | None = None
    uncast_nbytes: int | None = None
    error: str = ""
    rows: tuple[KeptRow, ...] = ()


def _is_float(x: Any) -> bool:
    """Returns whether an argument or result is an array of floats; a token has no dtype."""
    return jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating)


def kept_bytes(
    program: Callable[..., Sequence[Any]],
    shapes: Sequence[Any],
    params: Sequence[int],
) -> KeptBytes:
    """Returns the residuals of `jax.vjp` of a program.

    The derivative is that of all float outputs with respect to the parameters, or to all float
    inputs of a program without parameters. Each array counts once. Inputs, moved parameters, 16-bit
    copies of parameters, and values computed from constants do not count. 8-bit copies of
    parameters count. The numbers are those of the jaxpr: XLA may merge equal arrays, and recompute
    cheap ones.

    Args:
        program: The program, a function from arrays to arrays.
        shapes: The shapes of its arguments.
        params: The positions of its parameters.
    """
    floats = [i for i, x in enumerate(shapes) if _is_float(x)]
    wanted = [i for i in params if i in floats] or floats
    # A program without float inputs has no derivative, and no residuals.
    if not wanted:
        return KeptBytes()

    def residuals(*arrays: Any) -> Any:
        def floats_of(*given: Any) -> list[Any]:
            return [x for x in program(*given) if _is_float(x)]

        of_wanted = of_positions(floats_of, arrays, wanted)
        outputs, pullback = jax.vjp(of_wanted, *(arrays[i] for i in wanted))
        # `jax.vjp` only linearizes the program; if JAX cannot transpose it, this call raises.
        pullback(outputs)
        return pullback

    try:
        jaxpr = compat.body_of(compat.fresh_make_jaxpr(residuals, *shapes))
    except Exception as error:  # JAX, or a derivative rule of the user, may raise anything
        return KeptBytes(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    # `jax.vjp` also computes the outputs: equations that only the outputs need are removed.
    jaxpr = compat.without_dead_equations(jaxpr)
    inputs = [_Kind.PARAM if i in params else _Kind.OTHER for i in range(len(shapes))]
    kept_arrays = zip(jaxpr.outvars, _kinds(jaxpr, inputs), strict=True)
    # Operand 1 of a `source_view` is a 16-bit copy, which several `source_view` equations may
    # share. This copy counts in place of their results.
    views = _results_by(jaxpr, "source_view", 1)
    arrays = {views.get(v, v) for v, kind in kept_arrays if kind is _Kind.OTHER}
    arrays.difference_update(jaxpr.invars)
    full = sum(nbytes_of(v) for v in arrays if _dtype(v) == FLOAT32.name)
    total, uncast = sum(map(nbytes_of, arrays)), _uncast_nbytes(jaxpr, arrays)
    return KeptBytes(total, full, uncast, rows=_rows(jaxpr, arrays))


def is_gradient(jaxpr: AnyJaxpr) -> bool:
    """Returns whether a program contains a backward pass."""
    return any("transpose(" in name_stack(eqn) for eqn, _ in equations_in(jaxpr))


def _dtype(v: Any) -> str:
    return str(getattr(v.aval, "dtype", None))


def _rows(jaxpr: AnyJaxpr, arrays: Iterable[Any]) -> tuple[KeptRow, ...]:
    groups: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    producers = functools.cache(_producers)
    for v in arrays:
        primitive, names = _producer(producers, jaxpr, v)
        scope = re.sub(r"\d+", "*", "/".join(names))
        groups[_dtype(v), primitive, scope].append(nbytes_of(v))
    rows = [KeptRow(*key, len(sizes), sum(sizes)) for key, sizes in groups.items() if any(sizes)]
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.scope, row.primitive, row.dtype)))


# These primitives return their operands unchanged. A checkpoint applies them to the values that
# it saves.
_HANDS_ON = frozenset(("name", "reduce_precision", "optimization_barrier"))


def _producers(jaxpr: AnyJaxpr) -> dict[Any, JaxprEqn]:
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def _producer(
    producers: Callable[[AnyJaxpr], dict[Any, JaxprEqn]], jaxpr: AnyJaxpr, v: Any
) -> tuple[str, tuple[str, ...]]:
    """Returns the primitive that computes a value, even inside a call or loop, and its scopes."""
    if isinstance(v, Literal) or (eqn := producers(jaxpr).get(v)) is None:
        return "", ()
    position = eqn.outvars.index(v)
    if eqn.primitive.name in _HANDS_ON:
        return _producer(producers, jaxpr, eqn.invars[position])
    names, held = user_scopes(eqn), bodies(eqn)
    if len(held) != 1:
        return (contraction_in(eqn) or eqn).primitive.name, names
    body = compat.body_of(held[0].jaxpr)
    inner = body.outvars[held[0].results.index(position)]
    primitive, more = _producer(producers, body, inner)
    return primitive, (*names, *more)


def _uncast_nbytes(jaxpr: AnyJaxpr, arrays: Set[Any]) -> int:
    """Returns the bytes that arrays would have without casts to narrower dtypes.

    They are counted in the rewritten program: to trace and differentiate the float32 program as
    well would make the report take 1.5 times as long.
    """
    casts, sources = _results_by(jaxpr, "convert_element_type", 0), set()
    for array in arrays:
        while array in casts:
            array = casts[array]
        sources.add(array)
    sources.difference_update(jaxpr.invars)
    narrow = {dtype.name for dtype in COMPUTE_DTYPES}
    return sum(nbytes_of(v, FLOAT32.name if _dtype(v) in narrow else None) for v in sources)


def _results_by(jaxpr: AnyJaxpr, name: str, k: int) -> dict[Any, Any]:
    """Maps the first result of each equation of a primitive to operand ``k`` of the equation."""
    found = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == name)
    return {e.outvars[0]: e.invars[k] for e in found if not isinstance(e.invars[k], Literal)}


def _kinds(jaxpr: AnyJaxpr, inputs: Sequence[_Kind]) -> list[_Kind]:
    """Returns the `_Kind` of each output of a jaxpr."""

    def step(i: int, eqn: JaxprEqn, given: list[_Kind]) -> list[_Kind]:
        held, count = bodies(eqn), len(eqn.outvars)
        if len(held) != 1:
            return [_of_equation(eqn, given)] * count
        (body,) = held
        outputs = _kinds(body.jaxpr, entering(body, given, _Kind.OTHER))
        return leaving(body, outputs, _Kind.OTHER, count)

    return follow(jaxpr, inputs, _Kind.CONST, step)


def _of_equation(eqn: JaxprEqn, given: Sequence[_Kind]) -> _Kind:
    if all(kind is _Kind.CONST for kind in given) and not eqn.effects:
        return _Kind.CONST
    if eqn.primitive.name in _ZEROS:
        return _Kind.CONST  # XLA does not store zeros, so they count as constants
    arrays = given[:1] if eqn.primitive.name in _FIRST else given
    moved = eqn.primitive.name in _MOVES and _Kind.OTHER not in arrays
    return _Kind.PARAM if moved else _Kind.OTHER
