"""Facts from the parameters of ordinary equations: the only module that knows their names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from ...policies import FLOAT32
from ...policies.precisions import is_algorithm, precision_of
from ..compat import JaxprEqn, Literal, aval_of
from .held_contraction import contraction_in
from .traits import DERIVATIVES, having


def requested_precision(eqn: JaxprEqn) -> Any:
    """Returns a ``precision`` above the backend's default, None without one.

    ``HIGH`` of one operand is above it, and so is a dot algorithm, which names its dtypes.
    """
    precision: Any = eqn.params.get("precision")
    # A `DotAlgorithm` is a tuple, too.
    is_pair = isinstance(precision, tuple) and not isinstance(precision, lax.DotAlgorithm)
    words: tuple[Any, ...] = precision if is_pair else (precision,)
    return None if all(word in (None, lax.Precision.DEFAULT) for word in words) else precision


def without_request(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the parameter that drops the program's ``precision`` from a product in 16 bits."""
    # The precision was meant for float32 operands; an algorithm may refuse others.
    return {} if requested_precision(eqn) is None else {"precision": None}


def says_precision(eqn: JaxprEqn) -> bool:
    """Returns whether a product has a precision of its own."""
    return eqn.params.get("precision") is not None


_OF_FLOAT32 = (lax.DotAlgorithmPreset.DEFAULT, lax.DotAlgorithmPreset.F32_F32_F32)


def names_algorithm(eqn: JaxprEqn) -> bool:
    """Returns whether a float32 matmul names an algorithm other than float32's own."""
    if eqn.primitive.name != "dot_general":
        return False
    algorithm = eqn.params["precision"]
    if not isinstance(algorithm, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return False
    dtypes = {*(aval_of(v).dtype for v in eqn.invars), preferred_dtype(eqn) or FLOAT32}
    return algorithm not in _OF_FLOAT32 and dtypes == {FLOAT32}


def with_precision(eqn: JaxprEqn, word: str) -> dict[str, Any] | None:
    """Returns the parameter that makes a product of float32 operands run in a precision.

    Args:
        eqn: A contraction.
        word: One of `policies.precisions.PRECISIONS`.

    Returns:
        The parameter; None if the program has a precision of its own, or the primitive does not
        take the algorithm.
    """
    asked = eqn.params.get("precision")
    if asked is not None and asked != (lax.Precision.DEFAULT, lax.Precision.DEFAULT):
        return None
    precision = precision_of(word)
    if not is_algorithm(word):
        return {"precision": (precision, precision)}
    return {"precision": precision} if eqn.primitive.name == "dot_general" else None


def preferred_dtype(eqn: JaxprEqn) -> np.dtype | None:
    """Returns the ``preferred_element_type`` of an equation, None without one."""
    preferred = eqn.params.get("preferred_element_type")
    return None if preferred is None else np.dtype(preferred)


def with_preferred_dtype(dtype: np.dtype) -> dict[str, Any]:
    """Returns the parameter that makes a contraction return ``dtype``."""
    return {"preferred_element_type": dtype}


def cast_dtype(eqn: JaxprEqn) -> Any:
    """Returns the dtype that a ``convert_element_type`` casts to, None for another equation."""
    return eqn.params.get("new_dtype")


def casts_to_integer(eqn: JaxprEqn) -> bool:
    """Returns whether an equation casts floats to integers."""
    target = cast_dtype(eqn)
    if not isinstance(target, np.dtype) or target.kind not in "iu":
        return False
    return aval_of(eqn.invars[0]).dtype.kind not in "biu"


def adds_up_cotangents(eqn: JaxprEqn) -> bool:
    """Returns whether the transpose of an equation that repeats elements adds up many cotangents.

    The derivative of a maximum adds up, too: it counts the elements that are equal to the maximum.

    Args:
        eqn: A ``broadcast_in_dim``, ``tile``, ``gather`` or ``all_gather``, or a maximum or minimum
            of an axis or of windows.
    """
    params = eqn.params
    operand, result = (aval_of(v).shape for v in (eqn.invars[0], eqn.outvars[0]))
    if "broadcast_dimensions" in params:
        kept = dict(zip(params["broadcast_dimensions"], operand, strict=True))
        return any(length != kept.get(k, 1) for k, length in enumerate(result))
    if not params.keys().isdisjoint(("reps", "axes", "all_gather_dimension")):
        return operand != result
    if "window_strides" in params:
        # The windows that hold one element: 4 of 3 x 3 with stride 2, 9 with stride 1. So few
        # 16-bit terms lose no more than their own rounding; of 64 x 64 windows the sum stops at
        # 256 times its first term.
        pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
        return math.prod(-(-length // stride) for length, stride in pairs) > 9
    # Indices are known when the program runs: one row may be looked up 8,192 times. But a label's
    # logit is looked up once a row: there is one index for each of the dimensions of the batch.
    batch = params["dimension_numbers"].start_indices_batching_dims
    lengths = aval_of(eqn.invars[1]).shape[:-1]
    is_single = all(length == 1 for d, length in enumerate(lengths) if d not in batch)
    return not (params["unique_indices"] or is_single)


def iota_length(eqn: JaxprEqn) -> Any:
    """Returns the length that an ``iota`` counts to; `jax.export` may make it symbolic."""
    return eqn.params["shape"][eqn.params["dimension"]]


def has_plain_update(eqn: JaxprEqn) -> bool:
    """Returns False for ``x.at[i].apply(fn)``: a scatter whose computation is the user's ``fn``."""
    update = eqn.params.get("update_jaxpr")
    return eqn.primitive.name != "scatter" or update is None or not update.eqns


_SCATTERS = having("redispatch")
_SCATTER_OPTIONS = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def redispatched(eqn: JaxprEqn, *operands: Any) -> Any:
    """Emits a scatter anew, for operands of another dtype.

    Its adder is a jaxpr among its parameters, of a fixed dtype: bound again, it would add numbers
    of a dtype that it does not take.
    """
    options = {name: eqn.params[name] for name in _SCATTER_OPTIONS}
    scatter: Any = getattr(lax, eqn.primitive.name.replace("-", "_"))
    return scatter(*operands, **options)


def dot_dimensions(eqn: JaxprEqn) -> Any:
    """Returns the contracting and batch dimensions of a matmul, each for both operands."""
    numbers = eqn.params.get("dimension_numbers")
    return numbers or eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers


def free_dimensions(eqn: JaxprEqn) -> tuple[int, int] | None:
    """Returns how many dimensions of each operand of a matmul are neither summed nor of the batch.

    Returns:
        Two numbers, None for another equation than a matmul.
    """
    if eqn.primitive.name not in ("dot_general", "ragged_dot_general"):
        return None
    contracting, batch = dot_dimensions(eqn)
    left, right = (
        aval_of(v).ndim - len(c) - len(b)
        for v, c, b in zip(eqn.invars[:2], contracting, batch, strict=True)
    )
    return left, right


def multiplies_points(eqn: JaxprEqn, matrix: int) -> bool:
    """Returns whether a matmul applies a matrix to columns `x, y` or `x, y, z`, which are last.

    Args:
        eqn: The equation.
        matrix: The position of the matrix.
    """
    if eqn.primitive.name != "dot_general" or min(free_dimensions(eqn) or (0,)) < 1:
        return False
    shape, contracting = aval_of(eqn.invars[1 - matrix]).shape, dot_dimensions(eqn)[0]
    return shape[-1] in (2, 3) and len(shape) - 1 not in contracting[1 - matrix]


def is_norm(eqn: JaxprEqn) -> bool:
    """Returns whether a contraction is a sum of squares: `einsum("id,id->i", x, x)`.

    Not so a matrix that is multiplied by itself.
    """
    return eqn.invars[0] is eqn.invars[1] and free_dimensions(eqn) == (0, 0)


def reduction_depth(eqn: JaxprEqn) -> int:
    """Returns the number of products or elements that are summed into one element of a result.

    Args:
        eqn: An equation.

    Returns:
        The contracted size of a matmul, input features times window of a convolution, the reduced
        or accumulated size of a reduction, 1 for everything else.
    """
    # What autocast itself emits for a contraction is counted as that contraction.
    eqn = contraction_in(eqn) or eqn
    # A value of another type than arrays, such as a hijax variable of Flax, has no shape.
    shapes: list[tuple[int, ...]] = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    name, params = eqn.primitive.name, eqn.params
    if name in ("dot_general", "ragged_dot_general"):
        (contracting, _), _ = dot_dimensions(eqn)
        return math.prod(shapes[0][d] for d in contracting)
    if name == "conv_general_dilated":
        out_features = params["dimension_numbers"].rhs_spec[0]
        return math.prod(shapes[1]) // max(shapes[1][out_features], 1)
    if "axes" in params and name.startswith("reduce_"):
        return math.prod(shapes[0][d] for d in params["axes"])
    if name.startswith("cum"):
        return shapes[0][params["axis"]]
    return 1


def summands(eqn: JaxprEqn) -> int:
    """Returns how many terms may be added up into one element of a result, at most.

    As `reduction_depth`, also for windows, and for scatters: all updates may hit one element.
    """
    if "window_dimensions" in eqn.params:
        return math.prod(eqn.params["window_dimensions"])
    if eqn.primitive.name in _SCATTERS:
        return math.prod(aval_of(eqn.invars[1]).shape[:-1])
    return reduction_depth(eqn)


def exponent(eqn: JaxprEqn) -> int | None:
    """Returns the exponent of an ``integer_pow``, None for another equation."""
    return eqn.params["y"] if eqn.primitive.name == "integer_pow" else None


def derivative_exponents(eqn: JaxprEqn) -> dict[int, float]:
    """Returns the power of each operand that the derivative by it holds: `DERIVATIVES`."""
    n = exponent(eqn) or 1
    return {i: power(n) for i, power in DERIVATIVES.get(eqn.primitive.name, {}).items()}


def checkpoint_name_in(eqn: JaxprEqn) -> str:
    """Returns the name that ``jax.ad_checkpoint.checkpoint_name`` gives a value, "" for others."""
    return str(eqn.params["name"]) if eqn.primitive.name == "name" else ""


def subtracted_from_one(eqn: JaxprEqn) -> Any:
    """Returns the variable ``x`` of an equation ``1 - x``, None for any other equation.

    Example:
        >>> import jax
        >>> (eqn,) = jax.make_jaxpr(lambda x: 1 - x)(0.5).jaxpr.eqns
        >>> subtracted_from_one(eqn) is eqn.invars[1]
        True
    """
    if eqn.primitive.name != "sub":
        return None
    first, second = eqn.invars
    is_complement = isinstance(first, Literal) and first.val == 1
    return second if is_complement and not isinstance(second, Literal) else None
