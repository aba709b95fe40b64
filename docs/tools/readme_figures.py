"""The table of the README against hand-written mixed precision, from benchmarks/RESULTS.md."""

from __future__ import annotations

from results import handwritten, ratio, sections, tables_in

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
