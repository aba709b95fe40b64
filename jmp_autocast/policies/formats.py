"""Number formats by their bits, and `Emulated`: what of a scope is rounded to one.

A name says how many bits the exponent and the mantissa have, as ``"e5m7"``, and may be that of a
dtype of ml_dtypes, as ``"float8_e4m3fn"``. Formats that the Open Compute Project defines mean what
it defines: ``"e4m3"`` is ``float8_e4m3fn``, which ends at 448, and ``"float8_e4m3"`` the form with
infinities, which ends at 240.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, get_args

from .choices import check_choice
from .dtypes import SHORT_NAMES, find_dtype
from .errors import did_you_mean, shown, wrong_type

Specials = Literal["ieee", "nan", "unsigned", "none"]
"""What a format holds besides finite numbers: infinities and NaNs, as IEEE 754; one NaN, in place
of its largest number (``fn``); one NaN, in place of -0 (``fnuz``); or nothing."""

Part = Literal["products", "operations", "parameters"]
Rounding = Literal["nearest", "stochastic"]
Overflow = Literal["infinity", "saturate"]


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A binary floating point format of at most 8 exponent and 23 mantissa bits.

    Args:
        name: What it is called.
        exponent: The number of exponent bits.
        mantissa: The number of mantissa bits, without the leading one.
        bias: What is added to an exponent where it is stored.
        specials: As `Specials`.
        block: How many elements share a scale, a power of two; None for no scales.
        fits: The scale of a block is the smallest under which its largest element does not
            saturate. By the specification, False, it depends on the exponent of that element alone,
            and up to an eighth of it may be cut off.

    Example:
        >>> parse("e4m3").largest, parse("e5m2").largest, parse("mxfp4").largest
        (448.0, 57344.0, 6.0)
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    specials: Specials = "ieee"
    block: int | None = None
    fits: bool = False

    @property
    def bits(self) -> int:
        """How many bits an element has.

        Example:
            >>> parse("e5m7").bits
            13
        """
        return 1 + self.exponent + self.mantissa

    @property
    def top(self) -> int:
        """The exponent of the largest numbers.

        Example:
            >>> parse("e4m3").top, parse("e5m2").top
            (8, 15)
        """
        return 2**self.exponent - 1 - self.bias - (self.specials == "ieee")

    @property
    def bottom(self) -> int:
        """The exponent of the smallest normal numbers.

        Example:
            >>> parse("e5m10").bottom
            -14
        """
        return 1 - self.bias

    @property
    def largest(self) -> float:
        """The largest finite number.

        Example:
            >>> parse("float8_e4m3").largest
            240.0
        """
        # The NaN of an `fn` format is in place of its last number.
        missing = 1 if self.specials == "nan" else 0
        return 2.0 ** (self.top - self.mantissa) * (2 ** (self.mantissa + 1) - 1 - missing)

    @property
    def smallest(self) -> float:
        """The smallest positive number.

        Example:
            >>> parse("e4m3").smallest == 2.0**-9
            True
        """
        return 2.0 ** (self.bottom - self.mantissa)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number: a rounding errs by half of it at most.

        Example:
            >>> parse("bfloat16").epsilon
            0.0078125
        """
        return 2.0**-self.mantissa


_BITS = re.compile(r"(float(\d+)_)?e(\d+)m(\d+)(fn|fnuz|b(\d+)fnuz)?")
_BLOCKS = {
    "mxfp8": "e4m3",
    "mxfp8_e4m3": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxfp6": "e2m3",
    "mxfp6_e2m3": "e2m3",
    "mxfp6_e3m2": "e3m2",
    "mxfp4": "e2m1",
    "mxfp4_e2m1": "e2m1",
}
_BLOCK = 32
# What the Open Compute Project calls so, and what ml_dtypes calls the same.
_OPEN_COMPUTE = {
    "e4m3": "float8_e4m3fn",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
}
_DTYPES = {"float16": "e5m10", "bfloat16": "e8m7", "float32": "e8m23"}
# Names that say nothing of their bits, and what is meant by them.
_WITHOUT_BITS = {
    "fp8": "'e4m3' or 'e5m2'",
    "float8": "'e4m3' or 'e5m2'",
    "fp6": "'e2m3' or 'e3m2'",
    "float6": "'e2m3' or 'e3m2'",
    "fp4": "'e2m1'",
    "float4": "'e2m1'",
    "int8": "'mxfp8': there are no integer formats",
    "int4": "'mxfp4': there are no integer formats",
    "nvfp4": "'mxfp4'",
    "tf32": "'e8m10'",
}
# What gradients are rounded to where a product has a format and nobody says another: that of
# Transformer Engine's HYBRID, and of our own float8.
_GRADIENTS = {"float8_e4m3fn": "e5m2"}


def parse(name: Any, argument: str = "format") -> Format:
    """Returns the format that a name, a dtype or a `Format` means.

    Args:
        name: Exponent and mantissa bits (``"e5m7"``), a name of ml_dtypes
            (``"float8_e4m3fnuz"``), ``"bfloat16"``, ``"float16"``, one with scales of blocks
            (``"mxfp8"``, ``"mxfp6"``, ``"mxfp4"``, with ``_e3m2`` and the like behind it), a dtype,
            or a `Format`.
        argument: The argument's name, for the message.

    Raises:
        ValueError: The name says no bits, or more than float32 has.
        TypeError: It is none of these.

    Example:
        >>> parse("e5m7").mantissa, parse("mxfp6").block, parse("e4m3").specials
        (7, 32, 'nan')
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        dtype = find_dtype(name)
        if dtype is None:
            raise wrong_type(f"{argument} must be the name of a number format", name, _FIX)
        name = dtype.name
    word = SHORT_NAMES.get(name, name)
    if word in _BLOCKS:
        return dataclasses.replace(parse(_BLOCKS[word]), name=name, block=_BLOCK)
    word = _DTYPES.get(word, word)
    found = _BITS.fullmatch(_OPEN_COMPUTE.get(word, word))
    if found is None:
        raise ValueError(f"{argument} must name its bits, got {shown(name)}.{_meant(word)}")
    prefix, total, exponent, mantissa, ending, bias = found.groups()
    return _checked(
        name, argument, int(total) if prefix else None, int(exponent), int(mantissa), ending, bias
    )


# "float8" is a recipe of 8-bit products, and integers are told that they are no dtype of programs.
_LIKE_ONE = re.compile(
    r"(float\d+_)?(e\d+m?\d*|m\d+)(fn|fnuz|b\d+fnuz)?|mxfp.*|fp[468]|float[46]|nvfp4|tf32"
)


def is_format(value: Any) -> bool:
    """Returns whether a format is meant, and no dtype of programs: with a mistake in it, maybe.

    Example:
        >>> [is_format(value) for value in ("e4m3", "e4", "bfloat16", "float9")]
        [True, True, False, False]
    """
    if isinstance(value, Format | Emulated):
        return True
    dtype = None if isinstance(value, str) else find_dtype(value)
    word = value if dtype is None else dtype.name
    if not isinstance(word, str):
        return False
    return _LIKE_ONE.fullmatch(word) is not None


_FIX = "Write 'e5m7' for 5 exponent and 7 mantissa bits, or the name of one, such as 'mxfp8'."


def _meant(word: str) -> str:
    if word in _WITHOUT_BITS:
        return f" Write {_WITHOUT_BITS[word]}."
    known = (*_BLOCKS, *_OPEN_COMPUTE.values(), *_DTYPES)
    return f"{did_you_mean(word, known, cutoff=0.7)} {_FIX}"


def _checked(
    name: str,
    argument: str,
    total: int | None,
    exponent: int,
    mantissa: int,
    ending: str | None,
    bias: str | None,
) -> Format:
    bits = 1 + exponent + mantissa
    if not (2 <= exponent <= 8 and 0 <= mantissa <= 23) or (exponent == 8 and ending):
        raise ValueError(
            f"{argument} must have 2 to 8 exponent bits and 0 to 23 mantissa bits, which float32 "
            f"holds, got {name!r}. {_FIX}"
        )
    if total is not None and total != bits:
        raise ValueError(
            f"{argument} {name!r} names {total} bits, and a sign, {exponent} exponent and "
            f"{mantissa} mantissa bits are {bits}. Write 'float{bits}_e{exponent}m{mantissa}'."
        )
    if ending and not mantissa:
        raise ValueError(f"{argument} {name!r} has no mantissa bits: write 'e{exponent}m0'.")
    usual = 2 ** (exponent - 1) - 1
    if ending is None:
        return Format(name, exponent, mantissa, usual)
    if ending == "fn":
        # What has fewer than 8 bits has none to spare for a NaN.
        return Format(name, exponent, mantissa, usual, "nan" if bits >= 8 else "none")
    return Format(name, exponent, mantissa, int(bias) if bias else usual + 1, "unsigned")


@dataclasses.dataclass(frozen=True)
class Emulated:
    """What of a scope is rounded to a number format, emulated in float32, for studies.

    Everything else in the scope is float32, so that a result differs from that of float32 by this
    format alone. The rounded numbers are in float32, on any device, and nothing is faster.

    Args:
        format: The format, by its name: `parse` says which there are.
        of: ``"products"``: the operands of matrix products and convolutions, which add up in
            float32. ``"operations"``: the result of each operation, and of each product.
            ``"parameters"``: the parameters of the program as they are read, that is, as they are
            stored.
        gradient: The format of what the backward pass rounds: the cotangent of each product, or of
            each operation. None: e5m2 for e4m3, which is the usual pair, and its own format for any
            other. Through a rounding derivatives pass as they are. A rounding of parameters has no
            other part in the backward pass.
        rounding: ``"nearest"``, with ties to even; or ``"stochastic"``: to one of the two
            neighbors, so that the mean is exact. The draws are made from ``seed`` and from the
            values of the array: a program is a function still, and each step has draws of its own.
        overflow: What becomes of a number beyond the largest one. ``"infinity"``: an infinity, or
            NaN in a format that has none; ``"saturate"``: the largest number. A format that has
            neither, and one with scales of blocks, saturates always.
        seed: Of stochastic rounding.

    Raises:
        ValueError: There is no such format, or an option has an invalid value.
        TypeError: ``format`` is no name, or ``seed`` no integer.

    Example:
        >>> from jmp_autocast import BF16, Emulated
        >>> policy = BF16.with_scopes({"*/mlp": "e4m3", "*/norm": Emulated("e8m3", "operations")})
        >>> policy.scopes[0][1].gradient.name
        'e5m2'
    """

    format: Any
    of: Part = "products"
    gradient: Any = None
    rounding: Rounding = "nearest"
    overflow: Overflow = "infinity"
    seed: int = 0

    def __post_init__(self) -> None:
        format = parse(self.format, "Emulated.format")
        object.__setattr__(self, "format", format)
        usual = _GRADIENTS.get(_OPEN_COMPUTE.get(format.name, format.name), format)
        gradient = usual if self.gradient is None else self.gradient
        object.__setattr__(self, "gradient", parse(gradient, "Emulated.gradient"))
        check_choice("Emulated.of", self.of, get_args(Part))
        check_choice("Emulated.rounding", self.rounding, get_args(Rounding))
        check_choice("Emulated.overflow", self.overflow, get_args(Overflow))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise wrong_type("Emulated.seed must be an integer", self.seed, "Write one, such as 0.")

    def __repr__(self) -> str:
        """Returns the call that makes it, with what differs from the defaults."""
        options = "".join(f", {name}={value!r}" for name, value in self.changed.items())
        return f"Emulated({self.name!r}{options})"

    @property
    def name(self) -> str:
        """The format's name.

        Example:
            >>> from jmp_autocast import Emulated
            >>> Emulated("e5m7").name
            'e5m7'
        """
        return self.format.name

    @property
    def changed(self) -> dict[str, Any]:
        """The options that are not the default ones, by their names, as a policy file has them.

        Example:
            >>> from jmp_autocast import Emulated
            >>> Emulated("e4m3", gradient="e4m3", rounding="stochastic").changed
            {'gradient': 'e4m3', 'rounding': 'stochastic'}
        """
        plain = Emulated(self.format)
        found = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        }
        return found | ({"gradient": self.gradient.name} if "gradient" in found else {})
