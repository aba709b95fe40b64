"""The data flow: trace, plan, rewrite, run."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from .style import Style

_DATA = [
    ("fn", "your function,\nin float32"),
    ("jaxpr", "the program\nthat it traces to"),
    ("Plan", "a dtype and a reason\nfor each value"),
    ("jaxpr", "the program\nwith casts"),
    ("outputs", "the dtypes that\nfn declares"),
]
_STEPS = ["trace", "plan", "rewrite", "run"]
_WIDTH, _HEIGHT, _GAP = 1.42, 0.86, 0.72


def data() -> None:
    """There is nothing to measure."""


def draw(_: None, style: Style) -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(10.1, 2.75))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-0.05, 10.05)
    axes.set_ylim(0.1, 2.85)
    axes.axis("off")
    lefts = [index * (_WIDTH + _GAP) for index in range(len(_DATA))]
    for left, (title, text) in zip(lefts, _DATA, strict=True):
        edge = style.cast if title == "Plan" else style.faint
        _box(axes, left, 1.1, title, text, style, edge)
    for left, step in zip(lefts, _STEPS, strict=False):
        start, end = left + _WIDTH + 0.03, left + _WIDTH + _GAP - 0.03
        _arrow(axes, (start, 1.53), (end, 1.53), style.text)
        axes.text((start + end) / 2, 1.62, step, ha="center", va="bottom", weight="bold")
    middle = lefts[1] + _WIDTH + _GAP / 2
    axes.text(middle, 2.6, "Policy: rules, scopes, level", ha="center", va="center")
    _arrow(axes, (middle, 2.45), (middle, 1.9), style.text)
    plan = lefts[2] + _WIDTH / 2
    axes.text(plan, 0.28, "explain", ha="center", va="center", family="DejaVu Sans Mono")
    _arrow(axes, (plan, 1.06), (plan, 0.45), style.text)
    note = "planning calls no JAX tracing"
    axes.text(lefts[1] + _WIDTH, 0.78, note, ha="center", va="center", color=style.faint)
    note = "rewriting decides no dtype"
    axes.text(lefts[3] + _WIDTH / 2, 0.78, note, ha="center", va="center", color=style.faint)
    return figure


def _box(
    axes: Axes, left: float, bottom: float, title: str, text: str, style: Style, edge: str
) -> None:
    shape = "round,pad=0,rounding_size=0.08"
    box = FancyBboxPatch(
        (left, bottom), _WIDTH, _HEIGHT, boxstyle=shape, facecolor=style.box, edgecolor=edge
    )
    axes.add_patch(box)
    middle = left + _WIDTH / 2
    mono = "DejaVu Sans Mono"
    axes.text(middle, bottom + 0.65, title, ha="center", va="center", family=mono, size=10)
    axes.text(middle, bottom + 0.27, text, ha="center", va="center", size=8, linespacing=1.3)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    arrow = FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=9, color=color, shrinkA=0, shrinkB=0
    )
    axes.add_patch(arrow)
