"""Measures one variant of one case."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jmp_autocast.interpreters import Planner

from .cases import Case, Loss, Tree
from .counts import Cast, casts_and_dots, converts_in_hlo, low_share, mixed
from .errors import errors
from .residuals import Residuals, residuals
from .variants import Variant

LOSS_SCALE = {"bfloat16": 1.0, "float16": 1024.0}
"""float16 gradients underflow; every 16-bit variant gets the same fixed scale."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured of one variant; bytes, seconds, and relative errors.

    Args:
        residuals: What the forward pass keeps.
        temporary: Peak temporary bytes of the compiled gradient.
        casts: Every cast in the gradient's jaxpr.
        hlo_converts: Convert instructions of the compiled gradient.
        low_flops: The share of the FLOPs of dots and convolutions on 16-bit operands.
        mixed_dots: Dots whose operands have different dtypes.
        errors: The relative error of the loss and of each group of gradients.
        seconds: ``trace`` (with planning), ``plan``, ``lower``, ``compile`` and ``step``.
        peak: Peak bytes of the device, None where it does not say.
    """

    residuals: Residuals
    temporary: int
    casts: tuple[Cast, ...]
    hlo_converts: int
    low_flops: float
    mixed_dots: int
    errors: dict[str, float]
    seconds: dict[str, float]
    peak: int | None = None

    def cast_count(self, *kinds: str) -> int:
        """Returns the number of casts of some kinds."""
        return sum(cast.kind in kinds for cast in self.casts)

    def cast_bytes(self, *kinds: str) -> int:
        """Returns the bytes that casts of some kinds read and write."""
        return sum(cast.nbytes for cast in self.casts if cast.kind in kinds)


def gradient(loss: Loss, scale: float) -> Callable[[Tree, Tree], tuple[Any, Tree, Tree]]:
    """Returns the step that is measured: loss, new state and gradients, times the loss scale."""

    def scaled(params: Tree, batch: Tree) -> tuple[Any, Any]:
        value, state = loss(params, batch)
        return (value if scale == 1 else scale * value), (value, state)

    def step(params: Tree, batch: Tree) -> tuple[Any, Tree, Tree]:
        (_, (value, state)), grads = jax.value_and_grad(scaled, has_aux=True)(params, batch)
        return value, state, grads

    return step


@contextlib.contextmanager
def planning_time() -> Iterator[list[float]]:
    """Gives a list with one number: the seconds spent in planning, plans within plans once."""
    original, spent, depth = Planner.plan, [0.0], 0

    def timed(self: Planner, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        start, depth = time.perf_counter(), depth + 1
        try:
            return original(self, *args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                spent[0] += time.perf_counter() - start

    Planner.plan = timed
    try:
        yield spent
    finally:
        Planner.plan = original


def measure(
    case: Case,
    variant: Variant,
    dtype: Any,
    examples: Sequence[tuple[Tree, Tree]],
    exact: Sequence[tuple[float, Tree]],
    steps: int,
    traces: int = 2,
) -> Measurement:
    """Measures a variant.

    Args:
        case: The model and its size.
        variant: How it gets mixed precision.
        dtype: The compute dtype.
        examples: Pairs of parameters and batch; the first is the one that is timed.
        exact: Loss and gradients in float64 for them.
        steps: The number of steps of which the median counts.
        traces: The number of traces of which the fastest counts.
    """
    scale = LOSS_SCALE[jax.numpy.dtype(dtype).name] if variant.low else 1.0
    params, batch = examples[0]
    best: dict[str, float] = {}
    for _ in range(traces):
        function = jax.jit(gradient(variant.make(case, dtype), scale))
        start = time.perf_counter()
        with planning_time() as planned:
            traced = function.trace(params, batch)
        seconds = {"trace": time.perf_counter() - start, "plan": planned[0]}
        start = time.perf_counter()
        lowered = traced.lower()
        seconds["lower"] = time.perf_counter() - start
        best = {name: min(s, best.get(name, s)) for name, s in seconds.items()}
    start = time.perf_counter()
    compiled = lowered.compile()
    best["compile"] = time.perf_counter() - start
    best["step"] = median_step(compiled, params, batch, steps)

    def run(params: Tree, batch: Tree) -> tuple[Any, Tree]:
        value, _, grads = compiled(params, batch)
        return value, jax.tree.map(lambda g: g / scale, grads)

    count = len(jax.tree.leaves(params))
    casts, dots = casts_and_dots(traced.jaxpr, count, count)
    return Measurement(
        residuals=residuals(variant.make(case, dtype), params, batch),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        casts=tuple(casts),
        hlo_converts=converts_in_hlo(compiled.as_text()),
        low_flops=low_share(dots),
        mixed_dots=mixed(dots),
        errors=errors(run, examples, exact),
        seconds=best,
    )


def median_step(step: Callable[..., Any], params: Tree, batch: Tree, steps: int) -> float:
    """Returns the median seconds of a step, after two to warm up."""
    params, batch = jax.device_put((params, batch))
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        jax.block_until_ready(step(params, batch))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
