"""Writes docs/measured.md from benchmarks/RESULTS.md: the table of the landing page.

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
from results import handwritten, number, section, tables  # noqa: E402

_HANDWRITTEN = "vs_handwritten full bfloat16 2-core CPU"
_LOSS_SCALE = "loss_scale 100M parameters 2-core CPU JAX 0.10.2"

# What stands in the columns: the table of RESULTS.md, its column, and the form of a number.
_COLUMNS = {
    "kept for the backward pass, MB": ("Memory", "residuals MB", "{:.1f}"),
    "casts of activations": ("Casts", "activation casts", "{:.0f}"),
    "error of kernel gradients": ("Relative error of gradients and loss", "kernels", "{:.1e}"),
}
_ROWS = {"float32": "float32", "by hand": "hand-written", "`autocast`": "ours o1"}
_TEXT = """\
<!-- Written by docs/tools/generate_results.py from benchmarks/RESULTS.md: edit that. -->

|  |  | {columns} |
|---|---|{rules}|
{rows}

The gradient of four Flax models in bfloat16. *By hand*: `dtype=` is given to every layer.
*`autocast`*: the float32 model under `autocast(loss, compute_dtype=jnp.bfloat16)`. Errors are
relative, against float64.{setting}

One Adam step with {parameters} parameters, with a check of the gradients and a skip of bad steps,
takes {ours} times as long as without; with Flax's `DynamicScale` {flax}, with jmp's
`DynamicLossScale` {jmp} times. The machine, the method and all numbers:
[Benchmarks](benchmarks.md).
"""


def render() -> str:
    """Returns the text of the page."""
    lines = []
    for heading, found in handwritten(_HANDWRITTEN).items():
        for name, row in _ROWS.items():
            cells = [
                form.format(number(found[table][row][column]))
                for table, column, form in _COLUMNS.values()
            ]
            model = heading.partition(":")[0] if row == "float32" else ""
            lines.append("| " + " | ".join([model, name, *cells]) + " |")
    (steps,) = tables(_LOSS_SCALE)
    return _TEXT.format(
        columns=" | ".join(_COLUMNS),
        rules="|".join(["---:"] * len(_COLUMNS)),
        rows="\n".join(lines),
        setting=_setting(),
        parameters=_LOSS_SCALE.split()[1],
        ours=steps["dynamic_loss_scaling"]["ratio"],
        flax=steps["flax DynamicScale"]["ratio"],
        jmp=steps["jmp DynamicLossScale"]["ratio"],
    )


def _setting() -> str:
    machine = section(_HANDWRITTEN).strip().partition(",")[0]
    return f" Memory and casts are counted in the program; the errors are from a {machine}."


def main(arguments: Sequence[str] | None = None, page: pathlib.Path = PAGE) -> int:
    """Writes or checks the page; returns the exit status."""
    return run(render, page, "generate_results.py", arguments)


if __name__ == "__main__":
    sys.exit(main())
