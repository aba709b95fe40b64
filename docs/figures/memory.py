"""Bars of what is kept for the backward pass, from benchmarks/RESULTS.md."""

from __future__ import annotations

from matplotlib.figure import Figure
from results import handwritten, number

from .style import Style

MARKER = "vs_handwritten full bfloat16 2-core CPU"
_BARS = {
    "float32": "float32",
    "hand-written": "dtype= by hand",
    "ours tensor_cores": 'autocast, "tensor_cores"',
    "ours o1": "autocast, default",
}


def data() -> dict[str, dict[str, float]]:
    """Returns the megabytes of residuals by model and variant."""
    found = {}
    for heading, tables in handwritten(MARKER).items():
        column = {row: number(cells["residuals MB"]) for row, cells in tables["Memory"].items()}
        found[heading.partition(":")[0]] = {name: column[name] for name in _BARS}
    return found


def draw(found: dict[str, dict[str, float]], style: Style) -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(8.2, 4.3))
    axes = figure.add_axes((0.09, 0.11, 0.88, 0.77))
    colors = {
        "float32": style.full,
        "hand-written": style.faint,
        "ours tensor_cores": style.cast,
        "ours o1": style.low,
    }
    step = len(_BARS) + 1.1
    for group, (model, megabytes) in enumerate(found.items()):
        for place, (variant, label) in enumerate(_BARS.items()):
            y = group * step + place
            share = 100 * megabytes[variant] / megabytes["float32"]
            shown = label if group == 0 else None
            axes.barh(y, share, height=0.84, color=colors[variant], label=shown)
            axes.text(share + 0.8, y, f"{megabytes[variant]:.1f} MB", va="center", size=8)
        axes.text(-2, group * step + 1.5, model, ha="right", va="center", weight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("kept for the backward pass, % of float32")
    figure.legend(loc="upper left", ncols=4, bbox_to_anchor=(0.07, 1.0), columnspacing=1.4)
    return figure
