"""The 16-bit dtypes that effects are told for, and rounding to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...policies import FLOAT32, narrow_dtypes
from ...policies.dtypes import as_float_dtype


@dataclasses.dataclass(frozen=True)
class Format:
    """A 16-bit dtype.

    Args:
        dtype: The dtype.
    """

    dtype: np.dtype
    bits: int = 16

    @property
    def name(self) -> str:
        """The name of the dtype."""
        return self.dtype.name

    @property
    def mantissa(self) -> int:
        """The number of mantissa bits, without the leading one."""
        return jnp.finfo(self.dtype).nmant


def parse(value: Any, argument: str = "format") -> Format:
    """Returns the 16-bit dtype that a name or dtype means.

    Raises:
        ValueError: It is none.
    """
    return Format(as_float_dtype(value, argument, narrow_dtypes(FLOAT32)))


def rounded(x: Any, format: Format | str) -> Any:
    """Returns a float32 value, rounded to a 16-bit dtype."""
    dtype = format.dtype if isinstance(format, Format) else np.dtype(format)
    # XLA removes a cast to 16 bits that is followed by one back, but not across a barrier.
    return lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)
