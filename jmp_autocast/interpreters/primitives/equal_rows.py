"""Rows of a table, with a derivative that adds up equal rows of a sequence before all others."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from ...policies import FLOAT32
from ..compat import inlined


def as_first_rows(rows: Any, ids: Any) -> Any:
    """Returns rows in float32, each as a function of the first row of its sequence that equals it.

    The values are those of ``rows``. In the derivative the first row of a sequence that has an id
    gets the float32 sum of the cotangents of all that have it, rounded once, and the others get
    zeros. What is left to add in 16 bits is a row for each sequence: for 16 sequences of 2,048
    tokens, drawn by Zipf's law, the bfloat16 gradient is 0.3 % off. Added in 16 bits alone it is
    35 % off; for 256 sequences it is 7 and 91 %. Sequences are not mixed, so that a device adds up
    its own.

    Args:
        rows: The rows that were looked up, 16 bits wide: the dimensions of ``ids`` come first.
        ids: The integers that they were looked up by; the last dimension is that of a sequence.

    Returns:
        The rows, widened.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> ids = jnp.zeros((2, 1024), int)
        >>> rows = jnp.ones((2, 1024, 1), jnp.bfloat16)
        >>> grad = jax.grad(lambda rows: as_first_rows(rows, ids).sum())(rows)
        >>> grad[:, :3, 0].astype(float).tolist()
        [[1024.0, 0.0, 0.0], [1024.0, 0.0, 0.0]]
    """
    return _inlined(rows, ids)


def _as_first_rows(rows: Any, ids: Any) -> Any:
    take = _taken
    for _ in ids.shape[:-1]:
        take = jax.vmap(take)
    return take(lax.convert_element_type(rows, FLOAT32), ids)


def _taken(rows: Any, ids: Any) -> Any:
    # XLA fuses the comparison of all pairs into the reduction: it needs no memory. Sorting takes
    # 13 ms and not 100 for 16 sequences of 2,048 on a CPU, but with it the TPU compiler at O0 packs
    # the arrays of a GPT on 256 chips into 1,077 MB and not 921.
    first = lax.argmax(ids[:, None] == ids[None, :], 1, np.int32)
    return rows.at[first].get(mode="promise_in_bounds", wrap_negative_indices=False)


_inlined = inlined(_as_first_rows)
