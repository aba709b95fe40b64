"""The kinds of risk that 16 bits are: what each says, and how large the error may be.

``u`` is the unit roundoff: 2**-8 in bfloat16, 2**-11 in float16. All formulas are first-order
bounds of N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd edition (2002): a
rounded operation errs by ``u`` (section 2.2), a sum by ``(n - 1) u`` of the sum of magnitudes
(section 4.2), and a function passes an error of its operand on as its condition number says
(section 1.6). Typical errors of sums are those of Higham and Mary, SIAM Journal on Scientific
Computing 41 (2019): rounding errors are as good as independent, so that ``sqrt(n)`` takes the place
of ``n``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

import jax.numpy as jnp


class Kind(NamedTuple):
    """A kind of risk.

    Args:
        says: What goes wrong.
        formula: How the estimate is made, and what it is relative to.
        fix: What to write instead.
    """

    says: str
    formula: str
    fix: str


_TEXTS = (resources.files(__package__ or "") / "kinds.toml").read_text("utf-8")

KINDS: Mapping[str, Kind] = {name: Kind(**said) for name, said in tomllib.loads(_TEXTS).items()}
"""Each kind by its name, in the order of the documentation."""


def unit_roundoff(dtype: Any) -> float:
    """Returns the largest relative error of one rounding.

    Example:
        >>> unit_roundoff("bfloat16") == 2**-8, unit_roundoff("float16") == 2**-11
        (True, True)
    """
    return float(jnp.finfo(dtype).eps) / 2


def estimate(kind: str, dtype: Any, n: float | None) -> tuple[float | None, float | None]:
    """Returns the error to expect, and the largest one.

    Args:
        kind: The name of the kind.
        dtype: The 16-bit dtype.
        n: How many terms, steps or positions there are; None where nobody knows it.

    Returns:
        Infinity for a largest error without a bound, and None for one that depends on values alone.
    """
    u = unit_roundoff(dtype)
    match kind:
        case "sum" | "gradient sum" | "product" | "accumulator":
            # A 16-bit sum of equal terms stops growing at 1 / u of them: more than all is not lost.
            return (None, 1.0) if n is None else (min(n**0.5 * u, 1), min((n - 1) * u, 1))
        case "exponential":
            # The condition number of exp is |x|, and exp(x) is finite up to x = log(largest).
            return 2 * u, (1 + math.log(float(jnp.finfo(dtype).max))) * u
        case "logarithm" | "power" | "digits":
            return 2 * u, math.inf
        case "norm" | "square":
            # bfloat16 has the range of float32: what is infinite in it is infinite there.
            return 1.5 * u, math.inf if dtype == jnp.float16 else 1.5 * u
        case "angle" | "position" if n is not None and n < math.inf:
            return n * u / 2, n * u  # nobody knows how large positions are that come from outside
        case "routing":
            return u, None
        case "mask":
            return math.inf, math.inf
        case "epsilon":
            return 1.0, 1.0
        case "update":
            return None, 1.0
        case "loss":
            return u, u
    return None, None
