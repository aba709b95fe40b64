"""What a program keeps for its backward pass: bytes, by dtype, by what makes it and by scope."""

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

from ...interpreters.after.provenance import entering, follow, leaving
from ...interpreters.compat import (
    AnyJaxpr,
    JaxprEqn,
    Literal,
    body_of,
    fresh_make_jaxpr,
    name_stack,
    without_dead_equations,
)
from ...interpreters.primitives.evaluate import of_positions
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.structure import bodies, equations_in
from ...interpreters.primitives.traits import having
from ...policies import COMPUTE_DTYPES, FLOAT32
from ..export import scaled, table
from ..measure.measured import user_scopes
from .jaxprs import nbytes_of

_SHOWN = 16


@dataclasses.dataclass(frozen=True)
class KeptRow:
    """Arrays that a program keeps for its backward pass, of one dtype, origin and scope.

    Args:
        dtype: Their dtype.
        primitive: The primitive that makes them; ``""`` for the carry of a loop.
        scope: The names of the scopes around it, joined by ``/``, with ``*`` for numbers, so that
            equal layers are one row.
        arrays: The number of arrays. The values of all iterations of a ``scan`` are one array.
        nbytes: Their bytes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain
        >>> def loss(w, x):
        ...     with jax.named_scope("layer_0"):
        ...         return jnp.sin(x @ w)
        >>> rows = explain(loss, jnp.ones((8, 8)), jnp.ones((4, 8)), policy=BF16).kept
        >>> [(row.dtype, row.primitive, row.scope, row.nbytes) for row in rows]
        [('bfloat16', 'convert_element_type', 'layer_*', 192), ('bfloat16', 'cos', 'layer_*', 64)]
    """

    dtype: str
    primitive: str
    scope: str
    arrays: int
    nbytes: int


def kept_lines(rows: Sequence[KeptRow]) -> list[str]:
    """Returns the lines of the table of kept arrays; none without rows."""
    if not rows:
        return []
    columns = {"bytes": ">7", "arrays": ">7", "dtype": "10", "kept, made by": "24", "scope": ""}

    def cells(row: KeptRow) -> list[Any]:
        return [scaled(row.nbytes), row.arrays, row.dtype, row.primitive or "a loop", row.scope]

    return ["", *table(columns, rows, cells, _SHOWN, "more; report.kept has all")]


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
        float32_nbytes: Those in float32.
        uncast_nbytes: What the same arrays would take if nothing were cast: all in float32, a copy
            is the array itself, and that of an input is in memory anyway.
        error: Why they are not known: what JAX, or a rule of the user's own, said.
        rows: The arrays by dtype, primitive and scope, the most bytes first.
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
    """
    floats = [i for i, x in enumerate(shapes) if _is_float(x)]
    wanted = [i for i in params if i in floats] or floats
    # A program without float inputs has no derivative, and keeps nothing.
    if not wanted:
        return KeptBytes()

    def kept(*arrays: Any) -> Any:
        def floats_of(*given: Any) -> list[Any]:
            return [x for x in program(*given) if _is_float(x)]

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
    full = sum(nbytes_of(v) for v in arrays if getattr(v.aval, "dtype", None) == FLOAT32)
    return KeptBytes(
        sum(map(nbytes_of, arrays)),
        full,
        _uncast_nbytes(jaxpr, arrays),
        rows=_rows(jaxpr, arrays),
    )


def _rows(jaxpr: AnyJaxpr, arrays: Iterable[Any]) -> tuple[KeptRow, ...]:
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    nbytes: collections.Counter[tuple[str, str, str]] = collections.Counter()
    makers = functools.cache(_makers)
    for v in arrays:
        primitive, names = _maker(makers, body_of(jaxpr), v)
        scope = re.sub(r"\d+", "*", "/".join(names))
        key = str(getattr(v.aval, "dtype", None)), primitive, scope
        counts[key] += 1
        nbytes[key] += nbytes_of(v)
    rows = [KeptRow(*key, counts[key], nbytes[key]) for key in counts if nbytes[key]]
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.scope, row.primitive, row.dtype)))


# What a checkpoint marks as saved was made before it.
_HANDS_ON = frozenset(("name", "reduce_precision", "optimization_barrier"))


def _makers(jaxpr: AnyJaxpr) -> dict[Any, JaxprEqn]:
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def _maker(
    makers: Callable[[AnyJaxpr], dict[Any, JaxprEqn]], jaxpr: AnyJaxpr, v: Any
) -> tuple[str, tuple[str, ...]]:
    """Returns the primitive that makes a value, also inside a call or loop, and its scopes."""
    if isinstance(v, Literal) or (eqn := makers(jaxpr).get(v)) is None:
        return "", ()
    if eqn.primitive.name in _HANDS_ON:
        return _maker(makers, jaxpr, eqn.invars[eqn.outvars.index(v)])
    names, held = user_scopes(eqn), bodies(eqn)
    if len(held) != 1:
        return (contraction_in(eqn) or eqn).primitive.name, names
    result = held[0].results.index(eqn.outvars.index(v))
    body = body_of(held[0].jaxpr)
    primitive, more = _maker(makers, body, body.outvars[result])
    return primitive, (*names, *more)


def _uncast_nbytes(jaxpr: AnyJaxpr, arrays: Set[Any]) -> int:
    """Returns the bytes of arrays as they would be without casts to narrower dtypes."""
    # Of a program in float32 there is no trace: to differentiate it as well would take half as long
    # again as the whole report.
    casts = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if _is_cast(eqn)}
    sources = set()
    for array in arrays:
        while array in casts:
            array = casts[array]
        sources.add(array)
    sources.difference_update(jaxpr.invars)
    narrow = {dtype.name for dtype in COMPUTE_DTYPES}
    names = ((v, str(getattr(v.aval, "dtype", None))) for v in sources)
    return sum(nbytes_of(v, FLOAT32.name if name in narrow else None) for v, name in names)


def _is_cast(eqn: JaxprEqn) -> bool:
    is_cast = eqn.primitive.name == "convert_element_type"
    return is_cast and not isinstance(eqn.invars[0], Literal)


def is_gradient(jaxpr: AnyJaxpr) -> bool:
    """True for a program that holds a backward pass: what it keeps is inside it.

    Args:
        jaxpr: An open or closed jaxpr.
    """
    return any("transpose(" in name_stack(eqn) for eqn, _ in equations_in(jaxpr))


def _is_view(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "source_view" and not isinstance(eqn.invars[1], Literal)


def _kinds(jaxpr: AnyJaxpr, inputs: Sequence[_Kind]) -> list[_Kind]:
    """Returns the kind of each output of a jaxpr."""

    def step(i: int, eqn: JaxprEqn, given: list[_Kind]) -> list[_Kind]:
        held, count = bodies(eqn), len(eqn.outvars)
        if len(held) != 1:
            return [_of_equation(eqn, given)] * count
        (body,) = held
        made = _kinds(body.jaxpr, entering(body, given, _Kind.OTHER))
        return leaving(body, made, _Kind.OTHER, count)

    return follow(jaxpr, inputs, _Kind.CONST, step)


def _of_equation(eqn: JaxprEqn, given: Sequence[_Kind]) -> _Kind:
    if all(kind is _Kind.CONST for kind in given) and not eqn.effects:
        return _Kind.CONST
    if eqn.primitive.name in _ZEROS:
        return _Kind.CONST  # XLA keeps nothing of them
    arrays = given[:1] if eqn.primitive.name in _FIRST else given
    moved = eqn.primitive.name in _MOVES and _Kind.OTHER not in arrays
    return _Kind.PARAM if moved else _Kind.OTHER
