"""`significant_digits`: how many digits of a program's results are right, without a wider run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...call.arguments import check_function, name_of
from ...interpreters.compat import is_array_aval
from ...policies.errors import with_usage, wrong_type
from ..calls import check_concrete, returned_by, traced
from .devices import on_device
from .digits_probe import SAMPLES, Sample, Spread, SpreadReading, digits, spread
from .digits_report import Digits, DigitsRow, OutputDigits
from .measured import MeasuredEquation, each_reading, is_measurable, measured_equations


@with_usage("significant_digits(fn, *args)")
def significant_digits(
    fn: Callable[..., Any], *args: Any, samples: int = 8, seed: int = 0, **kwargs: Any
) -> Digits:
    """Runs a function several times with random rounding, and counts the digits that agree.

    Each operation rounds its result up or down by chance, as in the stochastic arithmetic of CADNA
    and Verrou. What differs from sample to sample is noise of rounding, and no digit of it is
    right; what agrees does not depend on how the program was rounded. No wider run is needed, so
    that it works for float64 programs, and where float64 itself would be as wrong. It says nothing
    of errors that are no roundings, such as those of a method or of the data.

    A program that is exact stays exact: ``x - x`` is 0 in all samples, and whole numbers add up.
    Loops, branches and calls are part of it; branches and the ends of loops are those of the first
    sample. A mean over few samples is itself uncertain, so that the digits are those which all
    runs share in 95 of 100 cases.

    All samples are one compiled program, a `jax.vmap` over them.

    Args:
        fn: The function, with or without `autocast`.
        *args: Its positional arguments.
        samples: How often it runs.
        seed: Of the random rounding.
        **kwargs: Its keyword arguments.

    Returns:
        The digits of each output, and of each value on the way there: ``print`` it, or see
        ``losses`` and ``by_scope()``.

    Raises:
        TypeError: ``fn`` is not callable, or returns no floats; an argument is a
            ``jax.ShapeDtypeStruct``; or ``samples`` or ``seed`` is no integer.
        ValueError: There are fewer than two samples.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import significant_digits
        >>> def smaller_root(b, c):  # of x**2 - 2 b x + c
        ...     return b - jnp.sqrt(b * b - c)
        >>> found = significant_digits(smaller_root, jnp.float32(300.1), jnp.float32(1.3))
        >>> found.outputs[0].digits < 3, found.losses[0].primitive
        (True, 'sub')
        >>> def better(b, c):
        ...     return c / (b + jnp.sqrt(b * b - c))
        >>> significant_digits(better, jnp.float32(300.1), jnp.float32(1.3)).outputs[0].digits > 6
        True
    """
    check_function(fn, "significant_digits", "Pass the function itself, and its arguments.")
    _check_options(samples, seed)
    check_concrete("significant_digits", (args, kwargs))
    call, closed = traced(fn, args, kwargs)
    avals, returned = returned_by(closed)
    floats = [i for i, aval in enumerate(avals) if is_array_aval(aval) and is_measurable(aval)]
    if not floats:
        raise TypeError(
            f"significant_digits measures floats, and {name_of(fn)} returns {returned}. Return a "
            "float before it is rounded to integers."
        )

    @jax.jit
    def run(*arrays: Any) -> tuple[dict[int, Spread], Any]:
        def sample(number: Any) -> tuple[dict[int, Spread], Any]:
            evaluated = Sample(number).start(closed, [], arrays)
            return {i: spread(evaluated.outputs[i][0]) for i in floats}, evaluated.readings

        numbers = jnp.arange(samples, dtype=jnp.uint32) + jnp.uint32(seed * 1009 % 2**32)
        each = jax.vmap(sample, axis_name=SAMPLES)(numbers)
        return jax.tree.map(lambda x: x[0], each)  # the samples know their spread together

    spreads, readings = jax.device_get(run(*map(on_device, call.arrays)))
    equations = enumerate(each_reading(measured_equations(closed), readings))
    rows = tuple(_row(index, *each, samples) for index, each in equations)
    outputs = {}
    for i, each in spreads.items():
        dtype = avals[i].dtype.name
        whole, worst = (digits(float(ratio), dtype, samples) for ratio in each)
        outputs[i] = OutputDigits(whole, worst, dtype)
    return Digits(name_of(fn), samples, rows, outputs)


def _row(index: int, equation: MeasuredEquation, read: SpreadReading, samples: int) -> DigitsRow:
    made, fewest, before = (
        digits(ratio, equation.dtypes[0], samples)
        for ratio in (read.whole, read.worst, read.before)
    )
    lost = round(max(before - made, 0.0), 1)
    numbers = {"digits": made, "fewest": fewest, "lost": lost, "runs": read.runs, "index": index}
    return DigitsRow(**dataclasses.asdict(equation), **numbers)


def _check_options(samples: Any, seed: Any) -> None:
    for name, value in (("samples", samples), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(f"{name} must be an integer", value, "Write one, such as 8.")
    if samples < 2:
        raise ValueError(
            f"samples must be at least 2, got {samples}: digits are those that samples share. "
            "Write samples=8."
        )
