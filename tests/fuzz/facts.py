"""What a program promises of a value before it runs: where a result has to be float32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

CONTRACTIONS = frozenset("dot_general conv_general_dilated ragged_dot_general".split())
MOVEMENT = frozenset(
    """
    reshape transpose broadcast_in_dim squeeze rev slice dynamic_slice gather concatenate pad copy
    select_n dynamic_update_slice scatter stop_gradient split name convert_element_type
    """.split()
)
ELEMENTWISE_FULL = frozenset(
    """
    exp exp2 expm1 log log1p pow rsqrt tan asin acos atan asinh acosh atanh sinh cosh erf_inv
    lgamma digamma fft cholesky lu qr geqrf householder_product eigh svd triangular_solve
    cumlogsumexp
    """.split()
)
SUMS = frozenset(
    "reduce_sum reduce_prod cumsum cumprod scatter-add scatter-sub scatter-mul".split()
)

_WIDE = (np.dtype("float32"), np.dtype("int32"), np.dtype("int64"), np.dtype("bool"))

# Of literals and one array of coordinates they make coordinates.
_AFFINE = frozenset("add sub mul div neg reshape transpose broadcast_in_dim squeeze rev".split())
PASSING = frozenset(("broadcast_in_dim", "convert_element_type", "reshape"))
_FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "div": np.divide,
    "sqrt": np.sqrt,
}


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is promised of one value.

    Its elements are known, it is made of literals alone, it is an index along an axis or a multiple
    of one, it is no part of an input, and it is float32, as is what reads it elementwise.
    """

    known: float | None = None
    literal: bool = False
    coordinates: bool = False
    computed: bool = False
    full: bool = False


NOTHING = Fact()


def literal_fact(value: Any) -> Fact:
    value = np.asarray(value)
    numeric = value.shape == () and value.dtype.kind in "fiub"
    return Fact(float(value) if numeric else None, literal=True)


def lacks(known: float, dtypes: frozenset[str]) -> bool:
    """True for a literal that no dtype holds: it becomes inf, 0, 1 or -1.

    Nothing becomes inf in bfloat16: the ends of float32's range are read as those of bfloat16's.
    """
    return math.isfinite(known) and all(_changes(known, dtype) for dtype in dtypes)


def _changes(known: float, dtype: str) -> bool:
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(known).astype(jnp.dtype(dtype)))
    too_large = not math.isfinite(rounded) and dtype != "bfloat16"
    return too_large or (rounded in (0.0, 1.0, -1.0) and rounded != known)


def guarded(eqn: Any, facts: Sequence[Fact], dtypes: frozenset[str]) -> bool:
    """True if a literal keeps an equation in float32."""
    if eqn.primitive.name in CONTRACTIONS and "bfloat16" in dtypes:
        return False  # what exceeds bfloat16 makes a product exceed float32
    return any(f.known is not None and lacks(f.known, dtypes) for f in facts)


def reads_coordinates(eqn: Any, xs: Sequence[Any], facts: Sequence[Fact]) -> bool:
    """True for a matrix product of coordinates: they never enter one in 16 bits."""
    if eqn.primitive.name not in CONTRACTIONS or all(x.ndim < 2 for x in xs[:2]):
        return False
    pairs = zip(xs[:2], facts, strict=False)
    return any(f.coordinates and x.size and np.max(np.abs(x)) > 1 for x, f in pairs)


def fact_of(eqn: Any, facts: Sequence[Fact], kept: bool) -> Fact:
    """What is promised of the result; ``kept``: a literal or coordinates keep it in float32."""
    name = eqn.primitive.name
    if name == "iota":
        return Fact(coordinates=eqn.params["dtype"] in (np.float32, np.int32, np.int64))
    known = _fold(name, facts) if len(eqn.outvars) == 1 else None
    if facts and all(f.literal for f in facts):
        return Fact(known, literal=True)
    if len(eqn.outvars) != 1 or any(_narrow(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return NOTHING
    coordinates = name in _AFFINE and all(f.coordinates or f.known is not None for f in facts)
    coordinates |= name == "convert_element_type" and facts[0].coordinates
    if eqn.outvars[0].aval.dtype != np.float32:
        return Fact(coordinates=coordinates)
    computed = name in CONTRACTIONS or name in ELEMENTWISE_FULL or name in SUMS
    computed |= any(f.computed for f in facts)
    full = name in ELEMENTWISE_FULL or name in SUMS or any(f.full for f in facts)
    if name in CONTRACTIONS:
        full = kept
    return Fact(known, False, coordinates, computed, computed and (full or kept))


def _narrow(aval: Any) -> bool:
    return getattr(aval, "dtype", None) not in _WIDE


def _fold(name: str, facts: Sequence[Fact]) -> float | None:
    if not facts or facts[0].known is None:
        return None
    if name in PASSING:
        return facts[0].known
    if name not in _FOLDS or any(f.known is None for f in facts):
        return None
    with np.errstate(all="ignore"):
        return float(_FOLDS[name](*(np.float32(f.known) for f in facts)))
