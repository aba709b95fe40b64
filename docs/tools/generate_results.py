"""Writes docs/measured.md from benchmarks/RESULTS.md: the table of the landing page and the README.

python docs/tools/generate_results.py           # writes the page
python docs/tools/generate_results.py --check   # exits with 1 if the page is out of date
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

PAGE = pathlib.Path(__file__).parents[1] / "measured.md"
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where a test imports this file

from pages import run  # noqa: E402
from results import handwritten, ratio, sections, tables_in  # noqa: E402

_HANDWRITTEN = "vs_handwritten full bfloat16 2-core CPU"

# The model's name in the tables of the compilers.
_MODELS = {"GPT": "gpt_scan_remat", "ViT": "vit", "ResNet": "resnet", "LSTM": "lstm"}
# From the label of a row to the table of RESULTS.md and its column.
_COMPILED = {
    'bytes moved by a training step, TPU v5e compiler, level `"compute"`': "traffic GB",
    "temporary bytes of that step": "temp MB",
}
_COUNTED = {
    "bytes kept for the backward pass": ("Memory", "residuals MB"),
    "error of kernel gradients, against float64, JAX 0.12 on a CPU": (
        "Relative error of gradients and loss",
        "kernels",
    ),
}
_TEXT = """\
<!-- Written by docs/tools/generate_results.py from benchmarks/RESULTS.md: edit that. -->

bfloat16, as ratios to the same model with `dtype=` written into every layer by hand (below 1 is
better than by hand):

| | {models} |
|---|{rules}|
{rows}

The first two rows are full AdamW steps as the TPU compiler builds them; no step was timed on a TPU.
The others are gradients of smaller models at the default level. [All results](benchmarks.md).
"""


def rows() -> list[str]:
    """Returns the rows of the table: ratios to hand-written mixed precision, by model."""
    compiled = {}
    for marker, text in sections("compilers "):
        if ", v5e" in marker:
            program = marker.removeprefix("compilers ").partition(":")[0]
            compiled[program] = tables_in(text)[0]
    found = {name.partition(":")[0]: each for name, each in handwritten(_HANDWRITTEN).items()}

    lines = []
    for label, column in _COMPILED.items():
        each = [ratio(compiled[p]["ours compute"][column]) for p in _MODELS.values()]
        lines.append((label, each))
    for label, (table, column) in _COUNTED.items():
        each = [ratio(found[model][table]["ours o1"][column]) for model in _MODELS]
        lines.append((label, each))
    return ["| " + " | ".join([label, *map("{:.2f}".format, each)]) + " |" for label, each in lines]


def render() -> str:
    """Returns the text of the page."""
    return _TEXT.format(
        models=" | ".join(_MODELS), rules="|".join(["---"] * len(_MODELS)), rows="\n".join(rows())
    )


def main(arguments: Sequence[str] | None = None, page: pathlib.Path = PAGE) -> int:
    """Writes or checks the page; returns the exit status."""
    return run(render, page, "generate_results.py", arguments)


if __name__ == "__main__":
    sys.exit(main())
