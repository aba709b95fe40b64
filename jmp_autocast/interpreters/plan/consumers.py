"""Finds in which dtype an equation reads its operands, before any dtype is planned.

Marks and needs decide it. Where they do not, because the dtype depends on a guard or on a vote, an
equation counts as reading both float32 and 16 bits, so that it changes no operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...policies import FLOAT32
from ...policies.registry import known_rule
from ..compat import JaxprEqn, Literal, aval_of
from ..primitives.picking import picks
from ..primitives.reading import (
    cast_dtype,
    derivative_exponents,
    free_dimensions,
    is_norm,
    requested_precision,
)
from ..primitives.traits import DERIVATIVES, having, leaves_float16
from ..regions import Region
from .avals import is_16_bit, is_as_large
from .data import literal_state
from .marks import GIVEN, PARAMETER, Marks, adds, is_stream
from .needs import (
    COMPARES_ANY,
    EITHER,
    HARMED,
    LEADS_ON,
    LOWERED,
    NOTHING,
    RAISED,
    ROWS,
    Need,
    cannot_pay,
    is_float32,
)
from .votes import SHIFTS, far_literal, literal_guard, summand_votes

_CONTRACTS = having("contracts")
_ROUNDS = having("rounds")
_SUMS = having("sums")
_FEEDS = having("feeds")
_FUSES = having("fuses")
_MOVES = having("moves") | having("joins")
_WIDE: Need = Need.FULL | Need.ONCE
_BEYOND: Need = Need.COMPUTED | Need.BEYOND


def reads(eqn: JaxprEqn, marks: Sequence[Marks], need: Need, region: Region) -> Need:
    """Returns how an equation reads its operands: LOW, FULL or both; COMPUTED unless it moves them.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
        need: The needs of its results.
        region: The precision in force at the equation.
    """
    name = eqn.primitive.name
    computed = NOTHING if name in _MOVES else Need.COMPUTED if name in _SUMS else _BEYOND
    if not region.lowers:
        return computed | _WIDE
    if known_rule(name, region.rule)[1] in ("rules", "registered"):
        return computed | EITHER
    if name in LOWERED:
        return computed | _of_product(eqn, marks, need, region)
    if name == "convert_element_type" and cast_dtype(eqn) != aval_of(eqn.invars[0]).dtype:
        return computed | _of_cast(cast_dtype(eqn), region)
    if name in COMPARES_ANY:
        return computed
    if name in _ROUNDS and not leads_to_no_product(eqn, need):
        return computed | need & (EITHER | (Need.ONCE if name in _FUSES else NOTHING))
    if name in LEADS_ON and need & Need.LEADS:
        return computed | _on_a_path(eqn, marks, need, region)
    return computed | _WIDE


def _of_product(eqn: JaxprEqn, marks: Sequence[Marks], need: Need, region: Region) -> Need:
    if eqn.primitive.name not in _CONTRACTS:
        return EITHER
    if is_float32(eqn, marks, need):
        return _WIDE if is_norm(eqn) or not cannot_pay(eqn) else EITHER
    is_half = region.compute_dtype == np.float16
    guards = [m.fixed or m.counted or m.whole or (is_half and m.exponential) for m in marks[:2]]
    promotes = free_dimensions(eqn) == (0, 0) or requested_precision(eqn) is not None
    # An extension, such as float8, decides itself how its products read their operands.
    is_low = not promotes and region.product is None and not any(guards)
    return Need.LOW if is_low else EITHER


def _of_cast(dtype: Any, region: Region) -> Need:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return NOTHING
    # float64 and complex numbers have the digits of float32. The 16-bit dtype that is not the
    # compute dtype has digits or a range that the compute dtype lacks.
    return Need.LOW if dtype == region.compute_dtype else EITHER if is_16_bit(dtype) else _WIDE


def _on_a_path(eqn: JaxprEqn, marks: Sequence[Marks], need: Need, region: Region) -> Need:
    """Returns how an elementwise equation reads its operands if it leads to a product."""
    dtype: Any = region.compute_dtype
    literals = [literal_state(v) for v in eqn.invars if isinstance(v, Literal)]
    is_full = any([m.wide for m in marks]) or is_accumulator(eqn, marks, need, region)
    is_full |= literal_guard(literals, dtype) is not None
    if not region.abstains:
        far = far_literal(eqn.primitive.name, literals, dtype)
        is_full |= far is not None or _has_vote(eqn, marks)
    is_raised = float32_consumer(eqn, marks, need, region) != ""
    if is_full or is_raised or derivative_leaves(eqn, marks, region):
        return _WIDE
    return Need.LOW if is_stream(eqn, marks, region.abstains) else EITHER


def _has_vote(eqn: JaxprEqn, marks: Sequence[Marks]) -> bool:
    """Whether a source votes for float32: data, or a parameter that is no bias."""
    shifts = eqn.primitive.name in SHIFTS
    for i, (v, m) in enumerate(zip(eqn.invars, marks, strict=True)):
        is_data = m.given == GIVEN.given and not m.fixed
        if is_data and (shifts or is_as_large(v, eqn.outvars[0])):
            return True
        if shifts and m.given == PARAMETER.given and summand_votes(eqn, marks, i, True):
            return True
    return False


def is_accumulator(eqn: JaxprEqn, marks: Sequence[Marks], need: Need, region: Region) -> bool:
    """Returns whether an equation computes an accumulator, such as a residual stream, in float32.

    In bfloat16, a residual stream lost 86 to 97 % of 24 branches of 1e-3. At level "compute" it has
    16 bits.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
        need: The needs of its results.
        region: The precision in force at the equation.
    """
    is_chained = need & Need.ADDED or any([m.summed for m in marks])
    return not region.abstains and bool(is_chained) and adds(eqn, marks)


def float32_consumer(eqn: JaxprEqn, marks: Sequence[Marks], need: Need, region: Region) -> str:
    """Returns the consumer for which an elementwise equation is raised to float32, "" for none.

    An equation that computes is raised for a consumer that loses digits. A cheap equation is also
    raised for others, or if all its consumers run in float32: a float32 `sin` would cost more than
    a cast of its result.

    A product of two computed values does not follow sums: in float32, `x + sigmoid(a) * b` would
    widen both factors. Nor does a value that is only moved: in float32, the residual
    stream of a ViT took over the layout of its patch convolution, for 5 to 10 % of a TPU's step.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
        need: The needs of its results.
        region: The precision in force at the equation.
    """
    name = eqn.primitive.name
    needed, is_low_stream = need & RAISED.get(name, NOTHING), is_stream(eqn, marks, region.abstains)
    if region.abstains and is_low_stream:
        needed &= ~Need.SHARP
    if needed and name not in _ROUNDS and (name in _FEEDS or needed & HARMED):
        return next(row for row in ROWS if needed & row.need).consumer
    is_cheap = name in _FEEDS and (
        name != "mul" or need & Need.BEYOND or any([m.given for m in marks])
    )
    is_lowered = aval_of(eqn.outvars[0]).dtype == FLOAT32
    if not (is_cheap and is_lowered) or not need & Need.COMPUTED or need & EITHER != Need.FULL:
        return ""
    return "" if is_low_stream else "all consumers"


def derivative_leaves(eqn: JaxprEqn, marks: Sequence[Marks], region: Region) -> bool:
    """Returns whether the derivative of an equation may leave the range of float16.

    JAX's derivative of `a / b` computes b**-2, which is 0 in float16 from b = 4,096 on and infinite
    below 1/256. Its derivative of a cube, as in a GELU, computes 3 x**2, infinite from 148 on. No
    loss scale mends these.

    Args:
        eqn: The equation.
        marks: The marks of its operands.
        region: The precision in force at the equation.
    """
    if region.compute_dtype != np.float16 or eqn.primitive.name not in DERIVATIVES:
        return False
    exponents = derivative_exponents(eqn).items()
    return any([leaves_float16(n) and not marks[i].fixed for i, n in exponents])


def leads_to_no_product(eqn: JaxprEqn, need: Need) -> bool:
    """Returns whether an elementwise equation leads, through others and moves, to no product.

    In bfloat16, `int(sigmoid(x @ w) * 255)` was wrong in 2 to 25 % of its elements. An equation
    that only chooses elements does not count, unless its derivative computes: that of a maximum
    counts ties, and that of picked elements adds up cotangents.

    Args:
        eqn: The equation.
        need: The needs of its results.
    """
    name = eqn.primitive.name
    chooses = name in _ROUNDS and not (name in _FEEDS or picks(eqn))
    return not (chooses or name in _CONTRACTS or need & Need.LEADS)
