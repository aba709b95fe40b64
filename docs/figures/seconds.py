"""Bars of the time of training steps on a CPU, from benchmarks/RESULTS.md."""

from __future__ import annotations

from matplotlib.figure import Figure
from results import number, tables

from .style import Style

MARKER = "cpu seconds JAX 0.12"
_PROGRAMS = {
    "GPT, 4 layers, width 512, 8 x 256 tokens: step": "GPT",
    "ViT-B, 4 images of 224 x 224: step": "ViT-B",
    "LSTM, 2 layers, width 512, 16 x 64 tokens: step": "LSTM",
    "ResNet, 3 blocks, 16 images of 32 x 32: step": "ResNet",
}
_BARS = {"float32": "float32", "by hand": "bfloat16 by hand", "ours": "autocast"}


def data() -> dict[str, dict[str, float]]:
    """Returns the milliseconds of a step by program and variant."""
    (table,) = tables(MARKER)
    return {
        short: {name: number(table[program][name]) for name in _BARS}
        for program, short in _PROGRAMS.items()
    }


def draw(found: dict[str, dict[str, float]], style: Style) -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(8.2, 3.4))
    axes = figure.add_axes((0.09, 0.14, 0.88, 0.72))
    colors = dict(zip(_BARS, (style.full, style.faint, style.low), strict=True))
    step = len(_BARS) + 0.8
    longest = 2.7  # a longer bar is cut, and its number says how long it is
    for group, (program, milliseconds) in enumerate(found.items()):
        for place, (variant, label) in enumerate(_BARS.items()):
            y = group * step + place
            share = milliseconds[variant] / milliseconds["float32"]
            shown = label if group == 0 else None
            end = min(share, longest)
            axes.barh(y, end, height=0.84, color=colors[variant], label=shown)
            cut = " ..." if share > longest else ""
            axes.text(end + 0.02, y, f"{milliseconds[variant]:.0f} ms{cut}", va="center", size=8)
        axes.text(-0.04, group * step + 1, program, ha="right", va="center", weight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, longest + 0.3)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("time of a training step, as a multiple of float32's")
    figure.legend(loc="upper left", ncols=3, bbox_to_anchor=(0.07, 1.0), columnspacing=1.4)
    return figure
