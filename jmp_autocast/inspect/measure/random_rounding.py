"""Rounds what an equation makes randomly up or down, as stochastic arithmetic does.

Where the error of an operation is known (`ERRORS`: sums, products, quotients, roots, casts), its
result becomes one of the two numbers around the exact one, with equal chances, and an exact
result stays. Other functions are taken to be right to the last bit. A sum of many terms rounds at
each of them, in an order that the compiler chooses: each term is rounded once more before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...interpreters.compat import JaxprEqn
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.traits import having
from ...policies import CONTRACTIONS, DEFAULT_RULES, CastPolicy
from ..effects.number_format import rounded

_INTEGERS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
# The last bits of a number that a product of two of its upper halves does not have room for.
_LOWER_HALF = {4: np.uint32(0xFFF), 8: np.uint64(0x7FFFFFF)}
# Errors of a product below this are no normal numbers, and XLA:CPU takes them for zero.
_SMALLEST = {4: 2.0**-100, 8: 2.0**-960}

# They have no rounding: elements of their operands, their negatives, whole numbers.
_EXACT = having("rounds") | having("snaps") | having("chooses") | having("zeros")
# Functions of matrices, and sums: their operands are rounded, too.
_OF_MANY = CONTRACTIONS | frozenset(
    name for name, rule in DEFAULT_RULES.items() if rule is CastPolicy.FP32_SET_OPT_DTYPE
)
_OF_MANY |= frozenset(
    """
    cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd triangular_solve
    tridiagonal tridiagonal_solve fft scatter-add scatter-sub scatter-mul
    """.split()
)


def rounds(eqn: JaxprEqn) -> bool:
    """Returns whether an equation makes numbers that have to be rounded."""
    name = (contraction_in(eqn) or eqn).primitive.name
    if name == "convert_element_type" or name in CONTRACTIONS:
        return True
    return name not in _EXACT and DEFAULT_RULES.get(name, CastPolicy.KEEP) is not CastPolicy.KEEP


def randomly_rounded(
    eqn: JaxprEqn, operands: Sequence[Any], run: Callable[[Sequence[Any]], list[Any]], draw: Any
) -> list[Any]:
    """Runs an equation, and rounds its results randomly.

    Args:
        eqn: The equation.
        operands: Its operands.
        run: Runs the equation on operands.
        draw: uint32 scalar: another one for each run of an equation, and each sample.
    """
    name = (contraction_in(eqn) or eqn).primitive.name
    if name in _OF_MANY:
        # Whole numbers add up exactly: counts, masks, one-hot rows.
        exact = _add_up_exactly(operands)
        operands = _unless(exact, operands, draw)
        return _unless(exact, _as_stored(run(operands)), draw + np.uint32(50))
    results = _as_stored(run(operands))
    if (error := ERRORS.get(name)) is not None and _is_real(results[0]):
        values = [jnp.asarray(x) for x in operands]
        return [_up_or_down(results[0], error(results[0], *values), draw)]
    exact = [_are_whole([*operands, x]) for x in results]
    return [
        _unless(e, [x], draw + np.uint32(k))[0]
        for k, (e, x) in enumerate(zip(exact, results, strict=True))
    ]


def _as_stored(values: Sequence[Any]) -> list[Any]:
    """Returns values that have no more digits than their dtypes.

    XLA takes a cast to 16 bits with a cast back for nothing, and keeps what was to be rounded.
    """
    return [
        rounded(x.astype(jnp.float32), x.dtype.name).astype(x.dtype)
        if _is_real(x) and x.dtype.itemsize == 2
        else x
        for x in values
    ]


def _unless(exact: Any, values: Sequence[Any], draw: Any) -> list[Any]:
    """Returns values whose last bits are random, but where they are exact."""
    noisy = [_last_bit(x, draw + np.uint32(2 * i + 1)) for i, x in enumerate(values)]
    pairs = zip(values, noisy, strict=True)
    return [x if x is y else jnp.where(exact, x, y) for x, y in pairs]


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating) and jnp.result_type(x).itemsize >= 2


# --- errors --------------------------------------------------------------------------------------
#
# From the rounded result and the operands to a number of the sign of what rounding took away.


def _of_sum(s: Any, a: Any, b: Any) -> Any:
    if s.dtype.itemsize == 2:
        # A float32 sum is rounded, too: that of 8320 and 6e-5 is 8320.
        wide = a.astype(jnp.float32) + b.astype(jnp.float32)
        error = _of_sum(wide, a.astype(jnp.float32), b.astype(jnp.float32))
        return (wide - s.astype(jnp.float32)) + error
    # Knuth's: exact for any two numbers.
    other = s - a
    return (a - (s - other)) + (b - other)


def _of_product(p: Any, a: Any, b: Any) -> Any:
    if p.dtype.itemsize == 2:
        return a.astype(jnp.float32) * b.astype(jnp.float32) - p.astype(jnp.float32)
    # Dekker's, with halves by their bits: XLA for CPUs fuses a product and a sum, which Veltkamp's
    # splitting does not survive.
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    error = ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2
    # Of so small numbers nothing is known: either direction is as likely.
    small = (jnp.abs(p) < _SMALLEST[p.dtype.itemsize]) & (a != 0) & (b != 0)
    return jnp.where(small, p, error)


def _halves(x: Any) -> tuple[Any, Any]:
    lower = _LOWER_HALF[x.dtype.itemsize]
    upper = lax.bitcast_convert_type(x, _INTEGERS[x.dtype.itemsize]) & ~lower
    upper = lax.bitcast_convert_type(upper, x.dtype)
    return upper, x - upper


def _of_quotient(q: Any, a: Any, b: Any) -> Any:
    if q.dtype.itemsize == 2:
        return a.astype(jnp.float32) / b.astype(jnp.float32) - q.astype(jnp.float32)
    # What is left of the dividend has the sign of the error, times that of the divisor.
    product = q * b
    return ((a - product) - _of_product(product, q, b)) * jnp.sign(b)


def _of_root(r: Any, a: Any) -> Any:
    if r.dtype.itemsize == 2:
        return jnp.sqrt(a.astype(jnp.float32)) - r.astype(jnp.float32)
    square = r * r
    return (a - square) - _of_product(square, r, r)


def _of_cast(y: Any, x: Any) -> Any:
    if not _is_real(x) or x.dtype.itemsize <= y.dtype.itemsize:
        return jnp.zeros_like(y)
    return x - y.astype(x.dtype)


ERRORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": _of_sum,
        "add_any": _of_sum,
        "sub": lambda s, a, b: _of_sum(s, a, -b),
        "mul": _of_product,
        "square": lambda p, a: _of_product(p, a, a),
        "div": _of_quotient,
        "sqrt": _of_root,
        "convert_element_type": _of_cast,
    }
)
"""The operations whose rounding error is known, by their primitives."""


# --- numbers beside a number ---------------------------------------------------------------------


def _up_or_down(x: Any, error: Any, draw: Any) -> Any:
    """Returns one of the two numbers around ``x + error``, with equal chances."""
    goes = (_bits(draw, jnp.shape(x)) & 1 == 1) & (error != 0) & jnp.isfinite(x)
    goes &= jnp.isfinite(error) & (x != 0)
    ends = jnp.where(error > 0, np.float32(jnp.inf), np.float32(-jnp.inf)).astype(x.dtype)
    return jnp.where(goes, lax.nextafter(x, ends), x)


def _last_bit(x: Any, draw: Any) -> Any:
    """Returns a number, or one of its neighbors; what is no array of floats as it is."""
    if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
        parts = (jnp.real(x), draw), (jnp.imag(x), draw + np.uint32(1))
        return lax.complex(*(_last_bit(*part) for part in parts))
    if not _is_real(x):
        return x
    x = jnp.asarray(x)
    up = jnp.where(_bits(draw + np.uint32(101), jnp.shape(x)) & 1 == 1, x, -x)
    return _up_or_down(x, up, draw)


def _bits(draw: Any, shape: Sequence[int]) -> Any:
    """Returns random bits for the elements of an array.

    By a hash of six operations, and not by that of JAX, which has a hundred: each equation of a
    program has one or two.
    """
    numbers = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    x = _mixed(numbers + _mixed(draw))
    return _mixed(x + draw) >> np.uint32(7)


def _mixed(x: Any) -> Any:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def draw_of(*numbers: Any) -> jax.Array:
    """Returns a number that tells runs apart that differ in any of some numbers.

    Args:
        numbers: uint32 scalars.

    Example:
        >>> len({int(draw_of(i, j)) for i in range(9) for j in range(9)})
        81
    """
    found = jnp.uint32(0x9E3779B9)
    for number in numbers:
        found = _mixed(found + jnp.asarray(number, jnp.uint32)) * np.uint32(3)
    return found


# --- whole numbers -------------------------------------------------------------------------------


def _whole(x: Any) -> Any:
    exact = np.float32(2.0 ** min(jnp.finfo(x.dtype).nmant + 1, 120)).astype(x.dtype)
    return (x == jnp.round(x)) & (jnp.abs(x) < exact)


def _are_whole(values: Sequence[Any]) -> Any:
    """Returns where all of several arrays hold whole numbers: ``2.0**3`` and ``exp(0)`` are exact.

    Only of arrays of one shape, and of numbers: where an element is made of others of its operands,
    nothing is said.
    """
    shape = jnp.shape(values[-1])
    found: Any = jnp.ones(shape, bool)
    for x in map(jnp.asarray, values):
        if not _is_real(x) or x.shape not in ((), shape):
            return jnp.zeros(shape, bool)
        found &= _whole(x)
    return found


def _add_up_exactly(values: Sequence[Any]) -> Any:
    """Returns whether all elements are whole numbers, and too few and small to add up to more."""
    most: Any = jnp.float32(1)
    found: Any = jnp.asarray(True)
    for x in map(jnp.asarray, values):
        if not _is_real(x):
            continue
        found &= jnp.all(_whole(x))
        most *= jnp.maximum(jnp.sum(jnp.abs(x.astype(jnp.float32))), 1)
    return found & (most < 2.0**24)
