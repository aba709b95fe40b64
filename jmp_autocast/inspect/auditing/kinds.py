"""The kinds of risk that 16 bits are: how large the error may be, and what to write instead.

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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp


class Estimate(NamedTuple):
    """How large an error may be.

    Args:
        typical: The error to expect, None where it depends on values alone.
        worst: The largest one; infinity where there is no bound, None as above.
    """

    typical: float | None
    worst: float | None


class Kind(NamedTuple):
    """A kind of risk.

    Args:
        says: What goes wrong.
        formula: How the estimate is made, and what it is relative to.
        fix: What to write instead.
        estimate: From the dtype and the number of terms, steps or positions (None where nobody
            knows it) to the estimate.
    """

    says: str
    formula: str
    fix: str
    estimate: Callable[[Any, float | None], Estimate]


def unit_roundoff(dtype: Any) -> float:
    """Returns the largest relative error of one rounding.

    Example:
        >>> unit_roundoff("bfloat16") == 2**-8, unit_roundoff("float16") == 2**-11
        (True, True)
    """
    return float(jnp.finfo(dtype).eps) / 2


def largest_integer(dtype: Any) -> int:
    """Returns the number up to which a dtype holds every integer.

    Example:
        >>> largest_integer("bfloat16"), largest_integer("float16")
        (256, 2048)
    """
    return round(1 / unit_roundoff(dtype))


def _of_terms(dtype: Any, n: float | None) -> Estimate:
    u = unit_roundoff(dtype)
    # A 16-bit sum of equal terms stops growing at 1 / u of them: more than all is not lost.
    return Estimate(None, 1.0) if n is None else Estimate(min(n**0.5 * u, 1), min((n - 1) * u, 1))


def _of_exponential(dtype: Any, n: float | None) -> Estimate:
    # The condition number of exp is |x|, and exp(x) is finite up to x = log(largest number).
    u = unit_roundoff(dtype)
    return Estimate(2 * u, (1 + math.log(float(jnp.finfo(dtype).max))) * u)


def _of_rounding(dtype: Any, n: float | None) -> Estimate:
    return Estimate(unit_roundoff(dtype), unit_roundoff(dtype))


def _of_large_values(dtype: Any, n: float | None) -> Estimate:
    # bfloat16 has the range of float32: what is infinite in it is infinite there.
    worst = math.inf if dtype == jnp.float16 else 1.5 * unit_roundoff(dtype)
    return Estimate(1.5 * unit_roundoff(dtype), worst)


def _unbounded(dtype: Any, n: float | None) -> Estimate:
    return Estimate(2 * unit_roundoff(dtype), math.inf)


def _of_positions(dtype: Any, n: float | None) -> Estimate:
    # Nobody knows how large positions are that come from outside.
    if n is None or n == math.inf:
        return _NOTHING
    return Estimate(n * unit_roundoff(dtype) / 2, n * unit_roundoff(dtype))


_NOTHING = Estimate(None, None)

_BEFORE = "cast before it: x.astype(jnp.float32)"

KINDS: dict[str, Kind] = {
    "sum": Kind(
        "many terms are added up in 16 bits",
        "of the sum of magnitudes of n terms: sqrt(n) u, at worst (n - 1) u",
        "jnp.sum(x, dtype=jnp.float32), or cast before it",
        _of_terms,
    ),
    "gradient sum": Kind(
        "the gradient of what was repeated is added up in 16 bits",
        "of the sum of magnitudes of n terms: sqrt(n) u, at worst (n - 1) u",
        "repeat in float32 and cast after it, or differentiate autocast(fn)",
        _of_terms,
    ),
    "product": Kind(
        "many factors are multiplied in 16 bits",
        "of the product of n factors: sqrt(n) u, at worst (n - 1) u",
        _BEFORE,
        _of_terms,
    ),
    "accumulator": Kind(
        "a loop adds up in 16 bits: the sum stops growing after 1 / u equal steps",
        "of the sum of magnitudes of n steps: sqrt(n) u, at worst (n - 1) u",
        "start the carry in float32, and cast what the loop returns",
        _of_terms,
    ),
    "exponential": Kind(
        "an exponential, as in a softmax, magnifies the rounding of its operand",
        "of the result: (1 + |x|) u; typical is |x| = 1, worst the largest x with a finite result",
        "jax.nn.softmax(x.astype(jnp.float32)); Flax: force_fp32_for_softmax=True",
        _of_exponential,
    ),
    "logarithm": Kind(
        "a logarithm magnifies the rounding of its operand near 1, and of 0 it is infinite",
        "of the result: u + u / |log x|; typical is x = e",
        _BEFORE,
        _unbounded,
    ),
    "power": Kind(
        "a power magnifies the rounding of its operands",
        "of the result: (1 + |y| + |y log x|) u, which has no bound",
        _BEFORE,
        _unbounded,
    ),
    "norm": Kind(
        "the root of a norm in 16 bits",
        "of the result: 1.5 u; in float16 the squares of 256 and more are infinite",
        "compute the norm in float32, and cast its result",
        _of_large_values,
    ),
    "square": Kind(
        "squares that are added up are infinite in float16 from 256 on",
        "of a square: 1.5 u, infinite beyond 65,504",
        "jnp.square(x.astype(jnp.float32))",
        _of_large_values,
    ),
    "angle": Kind(
        "the angle of a position is rounded: RoPE and sinusoids turn by that",
        "in radians, of an angle up to n: n u",
        "compute positions, frequencies, sine and cosine in float32, and cast the results",
        _of_positions,
    ),
    "position": Kind(
        "16 bits do not tell large positions apart: 257 is 256 in bfloat16",
        "in positions, of n of them: n u",
        "jnp.arange(n), an integer, or dtype=jnp.float32",
        _of_positions,
    ),
    "routing": Kind(
        "logits that round to one number are chosen by position: another expert",
        "logits that differ by less than u of their size are tied",
        "compute the router's logits in float32: jnp.dot(x, w, preferred_element_type=jnp.float32)",
        lambda dtype, n: Estimate(unit_roundoff(dtype), None),
    ),
    "mask": Kind(
        "a number of the program is infinite in 16 bits: a row masked throughout becomes NaN",
        "infinite",
        "jnp.finfo(x.dtype).min, or mask in float32",
        lambda dtype, n: Estimate(math.inf, math.inf),
    ),
    "epsilon": Kind(
        "a number that is added is 0 in float16: what it protects divides by 0",
        "all of the number",
        "compute in float32, or add jnp.finfo(x.dtype).tiny or more",
        lambda dtype, n: Estimate(1.0, 1.0),
    ),
    "update": Kind(
        "a weight or an average is kept in 16 bits: small updates are lost",
        "of the update: u |w| / |update|, and all of it below u |w| / 2",
        "keep it in float32, or wrap the optimizer by jmp_autocast.optimizers.kahan_summation",
        lambda dtype, n: Estimate(None, 1.0),
    ),
    "loss": Kind(
        "the loss is returned in 16 bits, with two or three digits",
        "of the loss: u",
        "cast what it is the mean of: jnp.mean(x.astype(jnp.float32))",
        _of_rounding,
    ),
    "function": Kind(
        "the policy computes it in float32: it magnifies the rounding of its operands",
        "depends on its values",
        _BEFORE,
        lambda dtype, n: _NOTHING,
    ),
}
"""Each kind by its name, in the order of the documentation."""
