"""How far samples of a program spread, equation by equation, and how many digits they share."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...interpreters.compat import JaxprEqn, Tracer
from ...interpreters.rewrite.values import Value
from .basic_blocks import EquationRun, Probe
from .evaluator import Evaluated, Evaluator
from .measured import as_real, is_measurable
from .random_rounding import draw_of, randomly_rounded, rounds
from .side_by_side import Program, Site, Values

SAMPLES = "samples"
"""The axis of `jax.vmap` along which a program runs several times."""


class Spread(NamedTuple):
    """How far the samples of an array lie apart.

    Args:
        whole: The norm of the standard deviations over that of the means.
        worst: The largest standard deviation over a mean, of one element.
    """

    whole: Any
    worst: Any


class SpreadReading(NamedTuple):
    """The spread of what equations make, each in its worst run.

    Args:
        whole: As for `Spread`.
        worst: See there.
        before: The largest ``whole`` of what it reads.
        runs: How often it ran.
    """

    # The defaults are those of an equation that has not run.
    whole: Any = np.float32(0)
    worst: Any = np.float32(0)
    before: Any = np.float32(0)
    runs: Any = np.uint32(0)


def spread(x: Any) -> Spread:
    """Returns how far the samples of an array lie apart; it is called in one of them.

    An element that is not finite in some samples has no digit; one that is in none is left out.
    """
    wide = jnp.float64 if jnp.finfo(x.dtype).bits == 64 else jnp.float32
    x = as_real(x).astype(wide)
    count = lax.psum(1, SAMPLES)
    finite = lax.psum(jnp.isfinite(x).astype(jnp.int32), SAMPLES)
    known = finite == count
    x = jnp.where(known, x, 0)
    # Unscaled, the square of 1e20 is infinite and that of 1e-23 is 0, in float32.
    largest = lax.pmax(jnp.max(jnp.abs(x)), SAMPLES)
    x = x / jnp.where(largest > 0, largest, 1)
    # Deviations from one of the samples: the mean of three equal numbers may be another one.
    first = first_sample(x)
    mean = lax.psum(x - first, SAMPLES) / count
    deviation = jnp.sqrt(lax.psum((x - first - mean) ** 2, SAMPLES) / (count - 1))
    mean = jnp.where(known, jnp.abs(first + mean), 0)
    deviation = jnp.where((finite > 0) & ~known, jnp.inf, deviation)
    norms = (jnp.sqrt(jnp.sum(each**2)) for each in (deviation, mean))
    found = Spread(_ratio(*norms), jnp.max(_ratio(deviation, mean)))
    return jax.tree.map(lambda x: x.astype(jnp.float32), found)


def _ratio(deviation: Any, mean: Any) -> Any:
    of_zero = jnp.where(deviation > 0, jnp.inf, 0.0).astype(mean.dtype)
    return jnp.where(mean > 0, deviation / jnp.where(mean > 0, mean, 1), of_zero)


def first_sample(x: Any) -> Any:
    """Returns a value as the first of the samples has it, in all of them."""
    return lax.all_gather(x, SAMPLES)[0]


class SpreadProbe(Probe):
    """Measures the spread of what equations make, and of what they read."""

    unread: Any = SpreadReading()

    def __init__(self) -> None:
        # What equations made, by the ids of the arrays, which are held: no other one gets its id.
        self._made: dict[int, tuple[Any, Spread]] = {}

    @contextlib.contextmanager
    def nested(self) -> Iterator[None]:
        """Forgets, at its end, what was made inside: tracers of a loop are none outside of it."""
        before = self._made
        self._made = dict(before)
        try:
            yield
        finally:
            self._made = before

    def measure(self, run: EquationRun) -> SpreadReading:
        """Returns the spread of the results of an equation, and of its operands."""
        # A literal is the same in all samples.
        operands = [x for x in run.operands[0] if isinstance(x, Tracer)]
        read = [x for x in operands if is_measurable(jax.typeof(x))]
        read = [self._made[id(x)][1] if id(x) in self._made else spread(x) for x in read]
        made = {id(x): (x, spread(x)) for x in run.results[0] if is_measurable(jax.typeof(x))}
        self._made |= made
        whole, worst = map(_largest, zip(*(each for _, each in made.values()), strict=True))
        before = _largest([each.whole for each in read])
        return SpreadReading(whole, worst, before, jnp.uint32(1))

    def settle(self, measured: SpreadReading, held: Any, ticks: Any) -> SpreadReading:
        """Returns the readings of equations that have each run once."""
        return measured

    def merge(self, first: SpreadReading, second: SpreadReading) -> SpreadReading:
        """Returns the readings of two runs of the same equations, ``first`` the earlier."""
        worst = jax.tree.map(jnp.maximum, first, second)
        return worst._replace(runs=first.runs + second.runs)


def _largest(values: Sequence[Any]) -> Any:
    return functools.reduce(jnp.maximum, values, jnp.float32(0))


class Sample(Evaluator):
    """Runs a program with random rounding, as one of several samples, side by side in a `vmap`.

    What steers a branch or a loop is that of the first sample.

    Args:
        number: The number of the sample, a tracer.
    """

    def __init__(self, number: Any) -> None:
        self._spreads = SpreadProbe()
        super().__init__(self._spreads)
        self._number = number
        self._sites = 0
        self.draw: Any = None

    def start(self, jaxpr: Any, programs: Any, arrays: Sequence[Any]) -> Evaluated:
        """Runs a whole program: see `Evaluator`."""
        return super().start(jaxpr, [RandomlyRounding(self)], arrays)

    def _measure(self, jaxpr: Any, programs: Any, args: Any, tick: Any) -> Evaluated:
        with self._spreads.nested():
            return super()._measure(jaxpr, programs, args, tick)

    def steers(self, x: Any) -> Any:
        """Returns the first sample's."""
        return first_sample(x)

    def emit(self, site: Site[Any], operands: list[Values]) -> list[Values]:
        """Runs one equation, and measures it."""
        # A site is traced once, and may run again and again: the tick tells these runs apart.
        self._sites += 1
        self.draw = draw_of(self._number, site.context.tick, self._sites)
        try:
            return super().emit(site, operands)
        finally:
            self.draw = None  # it may be a tracer of a loop, which ends


class RandomlyRounding(Program):
    """Runs equations as they were traced, and rounds what they make randomly.

    Args:
        sample: Draws for it.
    """

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self._sample = sample

    def emit(self, i: int, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Runs equation ``i``: see `Program`."""
        plain = super().emit
        if not rounds(eqn):
            return plain(i, eqn, operands)

        def run(operands: Sequence[Any]) -> list[Any]:
            return [value.array for value in plain(i, eqn, operands)]

        rounded = randomly_rounded(eqn, operands, run, self._sample.draw)
        # Each element is read many times in the next equation's rounding, and that in the one after
        # it: fused into one loop, a gelu took XLA for CPUs more than four minutes, and 1 s so.
        return list(map(Value, jax.lax.optimization_barrier(rounded)))

    def inner(self, i: int, eqn: JaxprEqn) -> list[Program]:
        """Returns a program for each jaxpr inside equation ``i``."""
        return [RandomlyRounding(self._sample) for _ in super().inner(i, eqn)]


# What of the spread of a few samples belongs to chance: the digits that all runs share in 95 of 100
# cases are fewer than those of the spread. Sohier et al., "Confidence intervals for stochastic
# arithmetic", ACM TOMS 47 (2021), equation 20.
_CONFIDENCE = 0.95


def correction(samples: int) -> float:
    """Returns how many digits to take off, for the chance that is in a few samples.

    Args:
        samples: How many there are.

    Example:
        >>> [round(correction(n), 2) for n in (3, 8, 30, 1000)]
        [1.09, 0.6, 0.42, 0.31]
    """
    from scipy.special import chdtri, ndtri

    freedom = samples - 1
    least = chdtri(freedom, 1 - (1 - _CONFIDENCE) / 2)
    return math.log10(math.sqrt(freedom / least) * ndtri((1 + _CONFIDENCE) / 2))


def digits(ratio: float, dtype: str, samples: int) -> float:
    """Returns how many decimal digits are right, at most as many as a dtype has.

    Args:
        ratio: A standard deviation over a mean.
        dtype: The name of the dtype.
        samples: How many samples there are.

    Example:
        >>> digits(0.0, "float32", 8), digits(1e-3, "float32", 8), digits(2.0, "float32", 8)
        (7.2, 2.4, 0.0)
    """
    most = (jnp.finfo(dtype).nmant + 1) * math.log10(2)
    if not ratio:
        return round(most, 1)
    found = -math.inf if math.isinf(ratio) else -math.log10(ratio) - correction(samples)
    return round(min(max(found, 0.0), most), 1)
