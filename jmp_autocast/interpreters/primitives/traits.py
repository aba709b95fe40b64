"""The traits of each primitive for planning, besides its cast policy: one row per primitive.

A second table, `BACKWARD`, shows which operands the derivative of each primitive reads, for
`interpreters/keep`.

A new primitive gets a row in both tables and a policy in `policies/tables.py`; a test fails without
them. A trait describes the effect of a primitive on values, and `interpreters/plan` decides by it.

| trait | meaning: the primitive ... |
|---|---|
| moves | rearranges, replicates or selects elements of operand 0, and is linear in it |
| affine | maps integers to integers, up to a scale: a sum of two positions is a position |
| rounds | commutes with rounding: rounded operands give the rounded result |
| clears | as `rounds`, and its transpose adds no cotangents: 16-bit cotangents stay exact |
| feeds | is cheap arithmetic: in float32 it costs a fused cast, and a consumer gets more digits |
| sums | adds up its operands element by element |
| shifts | may have a result smaller than an operand's rounding error, 2**-9 of the operand |
| chooses | returns one of the operands, or the result of a comparison |
| snaps | rounds to integers: a rounding error of the operand may change the result by 1 |
| replicates | broadcasts smaller operands: its transpose adds up cotangents of one element |
| repeats | returns elements of operand 0, and its transpose may add up their cotangents |
| damps | has a slope of at most 1/4: a rounding error of its operand does not add up in a loop |
| saturates | flattens towards a limit: 16 bits round to the limit, float32 does not |
| log0, div1 | needs all digits of operand 0 (log0) or 1 (div1): it is very steep near a value |
| redispatch | has its update computation as a parameter of fixed dtype: it is emitted anew |
| first | has the values of operand 0; other operands are indices, padding or its 16-bit copy |
| whole | returns each element of operand 0: the largest element is the same |
| picks | returns some of the elements of operand 0 |
| joins | returns the elements of all operands |
| travels | returns elements from other devices |
| same | makes no value that its operands do not hold |
| fuses | is fused by XLA into its consumer: its result is not stored |
| zeros | returns zeros, with the derivative of its operand |
| turns | is a wave within [-1, 1]: it makes the factors of a rotation from an angle |
| contracts | multiplies and sums: the work of tensor cores |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

_NAMES = frozenset(
    """
    moves affine rounds clears feeds sums shifts chooses snaps replicates repeats damps saturates
    log0 div1 redispatch first picks joins travels same whole fuses zeros turns contracts
    """.split()
)

# A primitive that moves elements of one operand commutes with rounding and keeps integers integers.
_MOVING = "moves affine rounds"

_ROWS: dict[str, str] = {
    # arithmetic
    "add add_any": "affine feeds sums shifts replicates",
    "sub": "affine feeds shifts replicates",
    "mul": "affine feeds replicates",
    "div": "affine feeds replicates div1",
    "rem": "feeds chooses replicates",
    "atan2": "feeds replicates",
    "square integer_pow": "feeds",
    "neg": "affine rounds clears fuses",
    "abs": "rounds clears fuses",
    "sign": "rounds",
    "max min": "affine rounds clears chooses replicates fuses",
    "clamp": "rounds clears chooses replicates fuses",
    "eq ne lt le gt ge": "chooses",
    "floor ceil round": "snaps",
    # The derivative of a maximum counts its ties in the dtype of the operand. 16 bits count to 256
    # (bfloat16) or 2,048 (float16).
    "reduce_max reduce_min": "rounds feeds repeats",
    "reduce_window_max reduce_window_min": "rounds clears repeats",
    "cummax cummin sort": "rounds",
    "select_n": "affine rounds clears fuses",
    "pad": "affine rounds clears first joins",
    "concatenate stack": "affine rounds joins",
    "dynamic_update_slice": "rounds",
    # functions
    "pow": "replicates log0",
    "log log1p log2 rsqrt acos acosh asin atanh erf_inv": "log0",
    # A tanh does not damp: near 0 it is the identity, so `tanh(h + rate * y)` integrates `y`.
    "logistic": "damps saturates",
    "tanh erf erfc": "saturates",
    "sin cos": "turns",
    "dot_general conv_general_dilated ragged_dot_general": "contracts",
    "scatter scatter-min scatter-max": "rounds redispatch",
    "scatter-add scatter-sub scatter-mul": "redispatch",
    # Movement of elements. The transpose of a replication adds up cotangents.
    "broadcast_in_dim": f"{_MOVING} repeats same fuses",
    "broadcast_to": _MOVING,
    "tile": f"{_MOVING} repeats",
    "gather": f"{_MOVING} repeats first picks",
    "dynamic_slice": f"{_MOVING} clears first picks",
    "copy copy_p reshape rev squeeze transpose": f"{_MOVING} clears same whole fuses",
    "slice split": f"{_MOVING} clears picks same fuses",
    "pvary": f"{_MOVING} clears same fuses",
    "stop_gradient name sharding_constraint": f"{_MOVING} clears whole",
    "unstack": f"{_MOVING} clears picks",
    """device_put with_memory_space_constraint reshard relayout layout_constraint pbroadcast
    pbroadcast_dynamic reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast
    vary_unreduced_cast_p""": f"{_MOVING} clears",
    "all_gather all_gather_invariant all_gather_reduced": f"{_MOVING} clears travels repeats",
    "all_to_all ppermute ragged_all_to_all": f"{_MOVING} clears travels",
    # Primitives with their own planning function, and primitives that autocast emits.
    "convert_element_type": "affine rounds",
    "optimization_barrier": "rounds same",
    "source_view pick": "first",
    "tangent_carrier": "zeros",
    "accumulate float8_dot dequantize row_major": "",
    # Each of these primitives was checked by hand, and has none of the traits.
    """exp exp2 expm1 one_minus_square polynomial asinh atan cosh sinh tan sqrt cbrt
    lgamma digamma polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta
    bessel_i0e bessel_i1e random_gamma cholesky cholesky_update eig eigh geqp3 geqrf hessenberg
    householder_product lu ormqr qr schur svd symmetric_product triangular_solve tridiagonal
    tridiagonal_solve fft reduce_sum reduce_prod cumsum cumprod cumlogsumexp
    is_finite argmax argmin top_k approx_top_k reduce_window_sum
    select_and_scatter_add dot_product_attention_fwd dot_product_attention_fwd_wrapper""": "",
}

FOLDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": np.add,
        "add_any": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.maximum,
        "min": np.minimum,
        "neg": np.negative,
        "abs": np.abs,
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "exp": np.exp,
        "log": np.log,
    }
)
"""For each primitive, the function that computes the value of the result if each operand is filled
with one known value.
"""

DERIVATIVES: Mapping[str, Mapping[int, Callable[[int], float]]] = MappingProxyType(
    {
        "div": {1: lambda n: -2},  # b**-2
        "atan2": {0: lambda n: 2, 1: lambda n: 2},  # 1 / (a**2 + b**2)
        "integer_pow": {0: lambda n: n - 1},  # n x**(n - 1)
        "square": {0: lambda n: 1},
        "sqrt": {0: lambda n: -1 / 2},
        "cbrt": {0: lambda n: -2 / 3},
    }
)
"""By primitive and operand, the exponent of the operand in JAX's derivative with respect to it;
``n`` is the equation's own exponent. Primitives that run in float32 by policy (an exponential, a
reciprocal, `rsqrt`, `tan`) are absent, because their derivatives run in float32, too. A test
derives the powers from JAX.
"""


def leaves_float16(exponent: float) -> bool:
    """Returns whether a power of a float16 number (2**-24 to 65,504) may leave float16's range.

    Args:
        exponent: The exponent of the power.

    Example:
        >>> [leaves_float16(e) for e in (-2, -1 / 2, 1, 2)]
        [True, False, False, True]
    """
    return exponent > 1 or exponent <= -2 / 3


def _read(rows: Mapping[str, str], words: frozenset[str] = _NAMES) -> dict[str, frozenset[str]]:
    table: dict[str, frozenset[str]] = {}
    for names, row in rows.items():
        traits = frozenset(row.split())
        if unknown := traits - words:
            raise AssertionError(f"no such trait: {', '.join(sorted(unknown))}")
        for name in names.split():
            if name in table:
                raise AssertionError(f"primitive {name!r} has two rows of traits")
            table[name] = traits
    return table


TRAITS: Mapping[str, frozenset[str]] = MappingProxyType(_read(_ROWS))
"""The traits of each primitive, by its name. Primitives whose policy is KEEP have no row: they are
bound in the dtypes that the program declares, so planning reads no trait of them.
"""


def having(trait: str) -> frozenset[str]:
    """Returns the names of the primitives with a trait.

    Args:
        trait: One of the words in the table above.

    Raises:
        AssertionError: There is no such trait.

    Example:
        >>> sorted(having("saturates"))
        ['erf', 'erfc', 'logistic', 'tanh']
    """
    if trait not in _NAMES:
        raise AssertionError(f"no such trait: {trait}")
    return frozenset(name for name, traits in TRAITS.items() if trait in traits)


# --- the operands of derivatives ---------------------------------------------------------------

_BACKWARD_NAMES = frozenset(
    "cheap elementwise reduces contracts linear bilinear linear0 flat".split()
)

# | word | meaning: the primitive ... |
# |---|---|
# | cheap | costs no more than reading its operands: a backward pass may compute it again |
# | elementwise | computes an element of its result from that element of each operand alone |
# | reduces | may have a result much smaller than its operand: such a result is always kept |
# | contracts | is never computed again; its operands may be |
# | linear | has a derivative that reads no float operand, as a select's reads the predicate only |
# | bilinear | is linear in operand 0 and in operand 1: the derivative by one reads the other |
# | linear0 | is linear in operand 0 only: the derivative by operand 0 reads operand 1 alone |
# | flat | has the derivative zero |
#
# A derivative reads all float operands, unless one of the last four words says otherwise.
_BACKWARD_ROWS: dict[str, str] = {
    """add add_any sub neg convert_element_type reduce_precision copy copy_p select_n real imag
    source_view""": "cheap elementwise linear",
    """reshape transpose broadcast_in_dim broadcast_to squeeze slice concatenate stack split unstack
    tile pad rev""": "cheap linear",
    # A sharding constraint may move data between devices, but most only name the sharding that an
    # array already has. MaxText has one after each norm and activation: if they were not
    # recomputed, their results would be 90 of the 1,713 MB that are kept (2 layers).
    "sharding_constraint": "cheap linear",
    "reduce_sum": "cheap linear reduces",
    "mul": "cheap elementwise bilinear",
    "div": "cheap elementwise linear0",
    """exp exp2 expm1 log log1p log2 tanh logistic erf erfc erf_inv sqrt rsqrt cbrt square
    integer_pow pow abs max min clamp sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2
    rem one_minus_square""": "cheap elementwise",
    "reduce_max reduce_min": "cheap reduces",
    """eq ne lt le gt ge and or xor not shift_left shift_right_arithmetic shift_right_logical
    population_count is_finite sign floor ceil round stop_gradient""": "cheap elementwise flat",
    "iota": "cheap flat",
    "argmax argmin reduce_and reduce_or": "cheap flat reduces",
    "dot_general conv_general_dilated ragged_dot_general accumulate": "contracts bilinear",
    # These primitives are not cheap, because their operands are large or on other devices. Their
    # derivatives read no float operand, but may read indices.
    """gather pick dynamic_slice dynamic_update_slice scatter-add scatter-sub cumsum fft
    reduce_window_sum name optimization_barrier device_put with_memory_space_constraint reshard
    relayout layout_constraint pvary pbroadcast pbroadcast_dynamic reduced_vary_cast
    reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p psum psum_invariant all_gather
    all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute
    reduce_scatter""": "linear",
    "polynomial": "cheap",
    # Each of these primitives was checked by hand, and is opaque on purpose (see `BACKWARD`).
    """approx_top_k bessel_i0e bessel_i1e cholesky cholesky_update cumlogsumexp cummax cummin
    cumprod digamma dot_product_attention_fwd dot_product_attention_fwd_wrapper eig eigh geqp3 geqrf
    hessenberg householder_product igamma igamma_grad_a igammac lgamma lu ormqr polygamma qr
    random_gamma reduce_prod reduce_window_max reduce_window_min regularized_incomplete_beta scatter
    scatter-max scatter-min scatter-mul schur select_and_scatter_add sort svd symmetric_product
    top_k triangular_solve tridiagonal tridiagonal_solve zeta""": "",
}

BACKWARD: Mapping[str, frozenset[str]] = MappingProxyType(_read(_BACKWARD_ROWS, _BACKWARD_NAMES))
"""The words of each primitive for the backward pass, by its name. A primitive without words is
opaque: it is never computed again, and its derivative is assumed to read all of its operands.
"""
