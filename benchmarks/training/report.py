"""Paired differences of final scores, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .loop import Outcome
from .programs import FLOAT32
from .tasks import TASKS, Task


class Difference(NamedTuple):
    """A paired difference of scores.

    Attributes:
        mean: Its mean over the seeds; above 0, float32 is better.
        error: The standard error of the mean.
    """

    mean: float
    error: float

    def __str__(self) -> str:
        star = " *" if abs(self.mean) > 2 * self.error else ""
        return f"{self.mean:+.1e} ± {self.error:.1e}{star}"


def difference(outcome: Outcome, reference: Outcome) -> Difference:
    """Returns how much worse an outcome is than the reference of the same seeds."""
    each = outcome.scores.astype(np.float64) - reference.scores
    return Difference(float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5))


def table(found: Mapping[str, Mapping[str, Outcome]]) -> list[list[str]]:
    """Returns the table.

    Args:
        found: Outcomes by the names of task and precision, of which one is float32's.

    Returns:
        Rows of cells, the header first.
    """
    precisions = [name for name in next(iter(found.values())) if name != FLOAT32.name]
    rows = [["model", "steps", "score", FLOAT32.name, *precisions, "16-bit FLOPs %", "skipped"]]
    for task in TASKS:
        if task.name in found:
            rows.append(_row(task, found[task.name], precisions))
    return rows


def _row(task: Task, outcomes: Mapping[str, Outcome], precisions: Sequence[str]) -> list[str]:
    full = outcomes[FLOAT32.name]
    low = [outcomes[name] for name in precisions]
    return [
        task.name,
        str(full.losses.shape[1]),
        task.measure,
        f"{full.scores.mean():.4g} ± {full.scores.std(ddof=1):.1g}",
        *(str(difference(outcome, full)) for outcome in low),
        ", ".join(f"{100 * outcome.low_flops:.0f}" for outcome in low),
        ", ".join(f"{outcome.skipped.mean():.1f}" for outcome in low),
    ]
