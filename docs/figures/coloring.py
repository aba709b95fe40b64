"""The planner's coloring of the transformer block: two lanes, and the casts between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import transformer_block
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from jmp_autocast import BF16, explain
from jmp_autocast.inspect import Row

from .style import Style

_FULL, _LOW = 1.0, 0.0
_PARTS = {
    "layer_norm": "norm",
    "attention": "attention",
    "mlp": "MLP",
    "block": "+",
}


@dataclasses.dataclass
class Node:
    """An equation on data: where it is drawn, and what it reads."""

    label: str
    part: str
    low: bool
    reads: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
    """Pairs of the index of the node that is read, and whether it is read in 16 bits."""


def data() -> list[Node]:
    """Returns the equations of the block that the input reaches, in program order."""
    arguments = transformer_block.shapes()
    closed = jax.make_jaxpr(transformer_block.block)(*arguments)
    rows = iter(explain(transformer_block.block, *arguments, policy=BF16).rows)
    *parameters, x, mask = closed.jaxpr.invars
    nodes = [Node("x", "", low=False)]
    made: dict[Any, int | None] = dict.fromkeys([*parameters, mask]) | {x: 0}
    _walk(closed.jaxpr, rows, made, nodes, "")
    return nodes


def _walk(
    jaxpr: Any, rows: Iterator[Row], made: dict[Any, int | None], nodes: list[Node], part: str
) -> None:
    for eqn in jaxpr.eqns:
        row = next(rows)
        inside = part or row.source.rpartition("(")[2].rstrip(")")
        found = [None if hasattr(v, "val") else made.get(v) for v in eqn.invars]
        if eqn.primitive.name == "jit":
            body = eqn.params["jaxpr"].jaxpr
            made.update(zip(body.invars, found, strict=True))
            _walk(body, rows, made, nodes, inside)
            outputs = [made.get(v) for v in body.outvars]
            made.update(zip(eqn.outvars, outputs, strict=True))
            continue
        reads = [
            (index, dtype == "bfloat16")
            for index, dtype in zip(found, row.operands, strict=True)
            if index is not None
        ]
        if not reads:  # parameters and masks
            made.update(dict.fromkeys(eqn.outvars))
            continue
        nodes.append(Node(row.primitive, inside, "bfloat16" in row.results, reads))
        made.update(dict.fromkeys(eqn.outvars, len(nodes) - 1))


def draw(nodes: list[Node], style: Style) -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(10.4, 3.6))
    axes = figure.add_axes((0.082, 0, 0.913, 1))
    axes.set_xlim(-1, len(nodes))
    axes.set_ylim(-1.0, 2.65)
    axes.axis("off")
    _parts(axes, nodes, style)
    for y, color, name in ((_FULL, style.full, "float32"), (_LOW, style.low, "bfloat16")):
        axes.text(-1.3, y, name, color=color, ha="right", va="center", weight="bold", size=10)
    casts: dict[tuple[int, bool], float] = {}
    for index, node in enumerate(nodes):
        for source, low in dict.fromkeys(node.reads):
            _edge(axes, nodes, source, index, low, casts, style)
    for x in casts.values():
        axes.plot(x, (_FULL + _LOW) / 2, marker="D", color=style.cast, markersize=6, zorder=4)
    for index, node in enumerate(nodes):
        y, color = (_LOW, style.low) if node.low else (_FULL, style.full)
        axes.plot(index, y, marker="o", color=color, markersize=7, zorder=5)
        offset, va = (-0.12, "top") if node.low else (0.12, "bottom")
        axes.text(index, y + offset, node.label, rotation=90, ha="center", va=va, size=8)
    axes.plot(-3.3, 0.5, marker="D", color=style.cast, markersize=6, clip_on=False)
    axes.text(-2.75, 0.5, "cast", color=style.cast, ha="left", va="center", size=9)
    return figure


def _parts(axes: Axes, nodes: list[Node], style: Style) -> None:
    start = 1
    for index in range(1, len(nodes) + 1):
        if index < len(nodes) and nodes[index].part == nodes[start].part:
            continue
        width = index - start
        band = Rectangle((start - 0.45, -0.95), width - 0.1, 3.3, facecolor=style.box, zorder=0)
        axes.add_patch(band)
        name = _PARTS[nodes[start].part]
        axes.text(start + (width - 1) / 2, 2.45, name, ha="center", va="bottom", size=9)
        start = index


def _edge(
    axes: Axes,
    nodes: list[Node],
    source: int,
    index: int,
    low: bool,
    casts: dict[tuple[int, bool], float],
    style: Style,
) -> None:
    start = _LOW if nodes[source].low else _FULL
    end = _LOW if nodes[index].low else _FULL
    if low == nodes[source].low:
        color = style.low if low else style.full
        _line(axes, (source, start), (index, end), color)
        return
    if (source, low) not in casts:  # one cast, however many read it
        casts[source, low] = x = source + 0.5
        color = style.low if nodes[source].low else style.full
        axes.plot([source, x], [start, 0.5], color=color, linewidth=1.3, zorder=2)
    at = (casts[source, low], 0.5)
    axes.plot(
        [at[0], index], [at[1], end], color=style.low if low else style.full, linewidth=1.3,
        zorder=2,
    )  # fmt: skip


def _line(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    distance = end[0] - start[0]
    if distance == 1 or start[1] != end[1]:
        axes.plot([start[0], end[0]], [start[1], end[1]], color=color, linewidth=1.3, zorder=2)
        return
    towards = 1 if start[1] == _LOW else -1  # arcs bend into the space between the lanes
    height = min(0.012 * distance + 0.06, 0.36) * 2
    bend = f"arc3,rad={towards * -height / distance * 2.2}"
    arc = FancyArrowPatch(
        start, end, connectionstyle=bend, arrowstyle="-", color=color, linewidth=1.0, alpha=0.8,
        shrinkA=0, shrinkB=0, zorder=1,
    )  # fmt: skip
    axes.add_patch(arc)
