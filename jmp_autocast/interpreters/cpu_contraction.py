"""16-bit contractions with a float32 result on XLA:CPU, which has some of them.

XLA:CPU multiplies bfloat16 matrices into float32 where the first contracts its last dimension, and
widens the operands of other matmuls. It decides that before it merges transpositions of operands
and results into a matmul, by which one of the former becomes one of the latter, and running it
fails with "Unsupported element type for DotThunk::Execute" (JAX 0.10 to 0.12). So what can be such
a matmul is written as one, between barriers that nothing is merged through, and what cannot reads
widened operands from the start.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import lax

from ..policies import FLOAT32
from .compat import bind

BFLOAT16 = np.dtype("bfloat16")


def contract_on_cpu(primitive: Any, params: dict[str, Any], *operands: Any) -> Any:
    """Contracts two 16-bit arrays into ``preferred_element_type``.

    Args:
        primitive: ``dot_general``, ``conv_general_dilated`` or ``ragged_dot_general``.
        params: Its parameters.
        *operands: Its operands.

    Returns:
        The contraction: the same products and sums, whether in 16 bits or widened.
    """
    out = params["preferred_element_type"]
    if primitive is lax.dot_general_p and out == FLOAT32 and _is_matmul(params, *operands):
        return _matmul(params, *operands)
    low = operands[0].dtype
    wide = [lax.convert_element_type(x, out) if x.dtype == low else x for x in operands]
    return bind(primitive, wide, params)


def _is_matmul(params: dict[str, Any], lhs: Any, rhs: Any) -> bool:
    _, (batch, _) = params["dimension_numbers"]
    # Dimensions that are merged would lose an explicit sharding.
    return lhs.dtype == BFLOAT16 and not batch and jax.typeof(lhs).sharding.mesh.empty


def _matmul(params: dict[str, Any], lhs: Any, rhs: Any) -> Any:
    """Contracts along one dimension, the last of the left and the first of the right operand."""
    (of_lhs, of_rhs), _ = params["dimension_numbers"]
    rows = [i for i in range(lhs.ndim) if i not in of_lhs]
    columns = [i for i in range(rhs.ndim) if i not in of_rhs]
    shape = [lhs.shape[i] for i in rows] + [rhs.shape[i] for i in columns]
    terms = math.prod(lhs.shape[i] for i in of_lhs)
    m, n = (math.prod(sizes) for sizes in (shape[: len(rows)], shape[len(rows) :]))
    lhs = lax.reshape(lax.transpose(lhs, (*rows, *of_lhs)), (m, terms))
    rhs = lax.reshape(lax.transpose(rhs, (*of_rhs, *columns)), (terms, n))
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    product = lax.dot_general(
        lhs,
        rhs,
        (((1,), (0,)), ((), ())),
        precision=params["precision"],
        preferred_element_type=FLOAT32,
    )
    return lax.reshape(lax.optimization_barrier(product), shape)
