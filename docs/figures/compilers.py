"""What compilers make of training steps, against hand-written ones, from benchmarks/RESULTS.md."""

from __future__ import annotations

from matplotlib.figure import Figure
from results import ratio, sections, tables_in

from .style import Style

Found = dict[str, dict[str, tuple[float, float]]]
"""From a program and a variant to the ratios of its bytes moved and of its temporary bytes."""

_PROGRAMS = {
    "gpt_scan_remat": "GPT, scan, remat",
    "gpt_scan": "GPT, scan",
    "gpt": "GPT",
    "vit": "ViT",
    "resnet": "ResNet",
    "lstm": "LSTM",
}
_VARIANTS = {
    "ours o1": "default",
    "ours compute": 'level "compute"',
    "ours compute + auto": '"compute", residuals="auto"',
}
_TARGETS = {"v5e": "TPU v5e", "h100": "H100"}


def data() -> Found:
    """Returns the ratios to the hand-written program, by program and chip."""
    found: Found = {}
    for marker, text in sections("compilers "):
        program = marker.removeprefix("compilers ").partition(":")[0]
        targets = [name for word, name in _TARGETS.items() if f", {word}" in marker]
        if program not in _PROGRAMS or not targets:
            continue  # on many or on other chips, which tables show
        (target,) = targets
        table = tables_in(text)[0]
        rows = {
            row: (ratio(cells["traffic GB"]), ratio(cells["temp MB"]))
            for row, cells in table.items()
            if row in _VARIANTS
        }
        found[f"{_PROGRAMS[program]}, {target}"] = rows
    return found


def draw(found: Found, style: Style) -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(8.2, 0.42 * len(found) + 1.3))
    panels = figure.subplots(1, 2, sharey=True)
    colors = dict(zip(_VARIANTS, (style.cast, style.low, style.good), strict=True))
    for k, (axes, title) in enumerate(
        zip(panels, ("bytes that kernels move", "temporary bytes"), strict=True)
    ):
        axes.axvline(1.0, color=style.faint, linewidth=1.2)
        axes.set_title("dtype= by hand", color=style.faint, size=8, x=0.7 / 1.05)
        for variant, color in colors.items():
            points = [(r[variant][k], y) for y, r in enumerate(found.values()) if variant in r]
            size = 9 if variant == "ours o1" else 6  # one may lie behind another
            axes.plot(
                *zip(*points, strict=True), "o", color=color, ms=size, label=_VARIANTS[variant]
            )
        axes.set_xlim(0.3, 1.35)
        axes.set_xlabel(f"{title}, by hand = 1")
        axes.grid(axis="y", color=style.faint, alpha=0.25)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(found)), list(found))
    panels[0].set_ylim(len(found) - 0.4, -0.6)
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=3)
    figure.subplots_adjust(left=0.22, right=0.98, top=0.84, bottom=0.15, wspace=0.08)
    return figure
