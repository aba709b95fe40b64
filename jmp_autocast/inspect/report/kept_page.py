"""`KeptReport` -> one HTML page: a picture of each cut, and tables of arrays and islands."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ...interpreters.keep.account import CutJaxpr, CutValue, Island, KeptArray
from ..export import counted, scaled
from ..static_page import Column, Figure, static_page

# Pixels: the distance between two bars, the height of the largest, and room for names below them.
_STEP, _HEIGHT, _NAMES = 14, 90, 150
# More bars than a reader looks at; JSON has all.
_BARS, _FIGURES = 400, 6
_UNREAD = "not read"
_CLASSES = {"kept": "kept", "computed again": "again", _UNREAD: "unread"}


def page_of(
    name: str,
    summary: str,
    kept: Sequence[KeptArray],
    islands: Sequence[Island],
    cuts: Sequence[CutJaxpr],
) -> str:
    """Returns the page of a report.

    Args:
        name: The function's name.
        summary: The report in one line.
        kept: The arrays that are kept, the largest first.
        islands: What is computed again.
        cuts: The planned jaxprs, value by value.
    """
    columns = "bytes", "dtype", "shape", "times", "made by", "read by", "because", "scope", "source"
    arrays = [
        (
            scaled(a.nbytes),
            a.dtype,
            list(a.shape),
            a.times,
            a.primitive or "input",
            ", ".join(a.readers),
            a.reason,
            a.scope,
            a.source,
        )
        for a in kept
    ]
    again = [
        (scaled(i.nbytes), scaled(i.flops), i.times, ", ".join(i.recomputed), i.scope)
        for i in islands
    ]
    of_islands = "bytes", "FLOPs", "times", "computed again", "scope"
    return static_page(
        f"What {name} keeps",
        summary,
        [
            ("Arrays that are kept, the largest first", list(map(Column, columns)), arrays),
            ("Computed again, in program order", list(map(Column, of_islands)), again),
        ],
        [_figure(each) for each in cuts[:_FIGURES] if each.values],
    )


def _figure(jaxpr: CutJaxpr) -> Figure:
    values = jaxpr.values[:_BARS]
    largest = max((v.nbytes for v in values if v.fate != _UNREAD), default=1)
    width, height = _STEP * (len(values) + 1), _HEIGHT + _NAMES
    bars = "".join(_bar(k, value, largest) for k, value in enumerate(values))
    picture = (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="The values of a jaxpr in program order, as bars of their bytes">{bars}</svg>'
    )
    each = f", in each of {jaxpr.times} runs" if jaxpr.times > 1 else ""
    left_out = len(jaxpr.values) - len(values)
    caption = (
        f"Each bar is a value, in program order, as high as its bytes (the highest: "
        f"{scaled(largest)}B{each}). Filled: kept for the backward pass. Outlined: computed again "
        "there. A line: no derivative reads it."
        + (f" {counted(left_out, 'value')} more in JSON." if left_out else "")
    )
    return Figure(f"The cut in {jaxpr.scope}" if jaxpr.scope else "The cut", picture, caption)


def _bar(k: int, value: CutValue, largest: int) -> str:
    x, tall = _STEP * k + 2, max(_HEIGHT * value.nbytes / largest, 2)
    if value.fate == _UNREAD:
        tall = 2
    name = value.primitive or "input"
    says = f"{name} {value.dtype}{list(value.shape)}, {scaled(value.nbytes)}B, {value.fate}"
    says = "\n".join(filter(None, (says, value.scope, value.source)))
    return (
        f'<g class="{_CLASSES[value.fate]}"><title>{html.escape(says)}</title>'
        f'<rect x="{x}" y="{_HEIGHT - tall:.1f}" width="{_STEP - 4}" height="{tall:.1f}"/>'
        f'<text transform="translate({x + 8} {_HEIGHT + 6}) rotate(90)">{html.escape(name)}</text>'
        "</g>"
    )
