"""Which batch fits: the largest whose arguments and temporary bytes a chip's memory holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp

from .measure import measure
from .programs import CASES, LOSSES, training_program
from .targets import devices

MEMORY = {"v5e": 16e9, "a100": 40e9, "h100": 80e9}
"""The chips, and the bytes of their memory, as their makers state them."""

WAYS = (
    ("gpt_scan", "float32"),
    ("gpt_scan", "hand-written"),
    ("gpt_scan", "ours compute"),
    ("gpt_scan", "ours compute + auto"),
    ("gpt_scan_remat", "hand-written"),
    ("gpt_scan_remat", "ours compute"),
)
"""Cases and variants, in order. Remat computes each layer twice."""

_FIRST, _SECOND = 2, 6


def largest(nbytes: Callable[[int], float], memory: float) -> int:
    """Returns the largest batch that fits, 0 for none.

    Args:
        nbytes: The bytes of a program of this batch; they grow by the same for each more example.
        memory: The bytes that there are.
    """
    low, high = nbytes(_FIRST), nbytes(_SECOND)
    slope = (high - low) / (_SECOND - _FIRST)
    batch = int(_FIRST + (memory - low) // slope)
    while batch > 0 and nbytes(batch) > memory:
        batch -= 1
    return max(batch, 0)


def step_bytes(target: str, name: str, variant: str, batch: int) -> float:
    """Returns the bytes of a training step: arguments, and the compiler's temporary ones."""
    case = CASES[name]
    case = dataclasses.replace(case, inputs=(batch, *case.inputs[1:]))
    loss = LOSSES[variant](case, jnp.dtype(jnp.bfloat16))
    row, _ = measure(training_program(case, loss, devices(target)[0]))
    if row.temporary is None:
        raise RuntimeError(f"{name}, {variant}, batch {batch}, for {target}: {row.note}")
    return row.temporary + (row.arguments or 0)


def table(
    targets: Sequence[str], effort: Callable[[str], AbstractContextManager[Any]]
) -> list[list[str]]:
    """Returns the cells, the header first: a row for each way, a column for each chip.

    Args:
        targets: The chips.
        effort: Returns the context in which programs for a chip are compiled.
    """
    chips = [f"{target}, {MEMORY[target] / 1e9:.0f} GB" for target in targets]
    cells = [["model", "variant", *chips]]
    for name, variant in WAYS:
        found = []
        for target in targets:
            nbytes = functools.partial(step_bytes, target, name, variant)
            with effort(target):
                found.append(str(largest(nbytes, MEMORY[target])))
            print(f"{name}, {variant}, {target}: {found[-1]}", flush=True)
        cells.append([name, variant, *found])
    return cells
