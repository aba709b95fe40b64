"""Which layers may run in e4m3: what effects predict, what rounding really does, and a training.

python docs/figures/effects.py     # runs the guide, prints its table, and writes effects.json
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:  # run as a script, this file has no package
    from .style import Style

_HERE = pathlib.Path(__file__).parent
_FILE = _HERE / "effects.json"
_GUIDE = _HERE.parent / "guides" / "effects.md"


def measured() -> dict[str, Any]:
    """Runs the program of the guide, and returns the numbers of the picture."""
    program: dict[str, Any] = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```", _GUIDE.read_text("utf-8"), re.M | re.S):
        exec(block, program)
    lower = program["lower"]
    curves = {"float32": program["losses"], "mixed": program["mixed_losses"]}
    return {
        "bound": program["bound"],
        "scopes": lower,
        "predicted": [float(f"{x:.2g}") for x in program["predicted"][1:]],
        "really": [float(f"{x:.2g}") for x in program["really"][1:]],
        "losses": {k: [float(f"{x:.4g}") for x in np.asarray(v)] for k, v in curves.items()},
    }


def rows(found: dict[str, Any]) -> list[str]:
    """Returns the rows of the guide's table."""
    lines = ["| in e4m3 | predicted | measured |", "|---|---|---|"]
    sums = zip(found["scopes"], found["predicted"], found["really"], strict=True)
    for k, (scope, predicted, really) in enumerate(sums):
        lines.append(f"| {'and ' * bool(k)}`{scope}` | {predicted} | {really} |")
    ends = [f"{np.mean(found['losses'][name][-20:]):.4f}" for name in ("float32", "mixed")]
    return [*lines, f"| loss after training in float32, and so | {ends[0]} | {ends[1]} |"]


def data() -> dict[str, Any]:
    """Returns the numbers that were measured last."""
    return json.loads(_FILE.read_text("utf-8"))


def draw(found: dict[str, Any], style: Style) -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(8.2, 3.2))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1))
    places = np.arange(len(found["scopes"]))
    pairs = (("predicted", style.faint, -0.2), ("really", style.low, 0.2))
    for (name, color, shift), label in zip(pairs, ("predicted", "measured"), strict=True):
        left.bar(places + shift, found[name], 0.38, color=color, label=label)
    left.axhline(found["bound"], color=style.cast, linewidth=1.2, linestyle="--", label="bound")
    names = [f"{'+ ' * bool(k)}{scope}" for k, scope in enumerate(found["scopes"])]
    left.set_xticks(places, [name.replace("/", "/\n") for name in names], size=8)
    left.set_ylabel("change of the loss")
    left.legend(loc="upper left")
    for name, label, color, width in (
        ("float32", "trained in float32", style.full, 2.6),
        ("mixed", "with these layers in e4m3", style.low, 1.2),
    ):
        right.plot(found["losses"][name], color=color, linewidth=width, label=label)
    right.set_yscale("log")
    right.set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    right.minorticks_off()
    right.set_xlabel("step")
    right.set_ylabel("loss")
    right.legend(loc="upper right")
    figure.subplots_adjust(left=0.09, right=0.99, top=0.97, bottom=0.15, wspace=0.2)
    return figure


if __name__ == "__main__":
    found = measured()
    _FILE.write_text(json.dumps(found) + "\n", "utf-8")
    print(*rows(found), sep="\n")
