"""What it means to lower one equation to a number format.

A product reads its operands in the format and rounds its result to it. In between it computes in
float32, as matrix units do, which add up in float32 whatever they multiply. Any other operation
rounds its result alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...interpreters.compat import JaxprEqn, bind
from ...policies import CONTRACTIONS
from ...policies.errors import did_you_mean, wrong_type


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format.

    Args:
        name: What it is called.
        exponent: The number of its exponent's bits.
        mantissa: The number of its mantissa's bits.
        largest: The largest finite number.
    """

    name: str
    exponent: int
    mantissa: int
    largest: float


FORMATS = {
    each.name: each
    for each in (
        Format("bfloat16", 8, 7, float(jnp.finfo(jnp.bfloat16).max)),
        Format("float16", 5, 10, 65504.0),
        Format("e4m3", 4, 3, 448.0),
        Format("e5m2", 5, 2, 57344.0),
        Format("float32", 8, 23, float(jnp.finfo(jnp.float32).max)),
    )
}


def parse(name: Any, argument: str = "format") -> Format:
    """Returns the format of a name.

    Args:
        name: The name, or a format.
        argument: What the message calls it.

    Raises:
        TypeError: It is neither.
        ValueError: There is no such format.
    """
    if isinstance(name, Format):
        return name
    known = ", ".join(map(repr, FORMATS))
    if not isinstance(name, str):
        raise wrong_type(f"{argument} must be the name of a number format", name, f"Write {known}.")
    if name not in FORMATS:
        raise ValueError(
            f"{argument} must be a number format, got {name!r}."
            f"{did_you_mean(name, FORMATS)} Write {known}."
        )
    return FORMATS[name]


def rounded(x: jax.Array, format: Format) -> jax.Array:
    """Returns float32 numbers rounded to the nearest of a format, ties to even, as float32.

    Args:
        x: The numbers. What is beyond the largest of the format becomes infinite.
        format: The format.
    """
    # Numbers of a format with e exponent bits are normal from 2**(2 - 2**(e - 1)) on. Below that
    # all have the same distance, which is that of float32 next to a power of two.
    bottom = 2 - 2 ** (format.exponent - 1)
    normal = lax.reduce_precision(x, 8, format.mantissa)
    step = bottom - format.mantissa
    if step + 24 > -120:
        next_to = jnp.float32(1.5 * 2.0 ** (step + 23))
        normal = jnp.where(jnp.abs(x) < 2.0**bottom, (x + next_to) - next_to, normal)
    return jnp.where(jnp.abs(normal) > format.largest, jnp.sign(x) * jnp.inf, normal)


def bound(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation for other operands.

    Args:
        eqn: The equation.
        operands: The operands.
    """
    made = bind(eqn.primitive, operands, eqn.params)
    return list(made) if eqn.primitive.multiple_results else [made]


def is_float(x: Any) -> bool:
    """Returns whether an array or number is rounded."""
    dtype = getattr(jax.typeof(x), "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def narrowed(x: Any, format: Format) -> Any:
    """Returns a value as a format has it, in its own dtype; what is no float comes back.

    Args:
        x: The value.
        format: The format.
    """
    if not is_float(x):
        return x
    x = jnp.asarray(x)
    return rounded(x.astype(jnp.float32), format).astype(x.dtype)


def lowered(
    eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any], format: Format
) -> list[Any]:
    """Returns the results of an equation that is lowered to a format.

    Args:
        eqn: The equation.
        operands: Its operands.
        results: Its results in float32.
        format: The format.
    """
    # What another operation reads was rounded, or not, where it was made: counted once more here,
    # the effects of a scope would add up to twice its own.
    if is_product(eqn):
        results = bound(eqn, [narrowed(x, format) for x in operands])
    return [narrowed(x, format) for x in results]


def is_product(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a matmul or a convolution."""
    return eqn.primitive.name in CONTRACTIONS
