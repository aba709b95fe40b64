"""Colors and sizes of the pictures, for light and for dark pages."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import matplotlib
from matplotlib.figure import Figure

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Style:
    """The colors of one mode."""

    name: str
    text: str
    faint: str
    low: str
    full: str
    cast: str
    good: str
    box: str


MODES = (
    Style("light", "#1f2328", "#8c959f", "#c2570c", "#0969da", "#8250df", "#1a7f37", "#f3f5f7"),
    Style("dark", "#e6edf3", "#8b949e", "#f0883e", "#58a6ff", "#d2a8ff", "#56d364", "#22262c"),
)
"""Orange is 16 bits and blue is float32 in every picture; violet is a cast."""


@contextlib.contextmanager
def styled(style: Style) -> Iterator[None]:
    """Sets what matplotlib takes from its settings, and what makes its files reproducible."""
    settings = {
        "svg.hashsalt": "jmp_autocast",
        "svg.fonttype": "path",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": style.text,
        "axes.labelcolor": style.text,
        "axes.edgecolor": style.faint,
        "xtick.color": style.text,
        "ytick.color": style.text,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings):
        yield


def save(figure: Figure, name: str, style: Style, folder: pathlib.Path) -> None:
    """Writes a picture as SVG, without a date and without a background."""
    path = folder / f"{name}-{style.name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
