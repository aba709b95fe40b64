"""Writes docs/concepts/block.md: every value of a transformer block, its dtype and the reason.

    python docs/tools/generate_block.py           # writes the page
    python docs/tools/generate_block.py --check   # exits with 1 if the page is out of date

The rows are those of `explain`; this file adds no dtype and no reason of its own.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Sequence

import jinja2

PAGE = pathlib.Path(__file__).parents[1] / "concepts" / "block.md"
# As a script this file finds docs/ alone, and imported by a test the repository alone.
sys.path[:0] = [str(pathlib.Path(__file__).parents[n]) for n in (0, 2)]

import transformer_block  # noqa: E402
from pages import run  # noqa: E402

from jmp_autocast import BF16, explain  # noqa: E402
from jmp_autocast.inspect import Row  # noqa: E402

_SOURCE = pathlib.Path(transformer_block.__file__)
_SHORT = {"float32": "f32", "bfloat16": "**bf16**"}
_LEVELS = ("tensor_cores", "o1", "compute")

_TEMPLATE = """\
<!-- Written by docs/tools/generate_block.py from transformer_block.py beside it: edit those. -->

# A transformer block, value by value

A block of plain JAX, written in float32: two norms, masked attention, and two dense layers with a
GELU. This page shows what `explain(block, ..., policy=BF16)` says of each of its equations.

```{picture} coloring
:alt: The equations of the block in two lanes, float32 and bfloat16, with the casts between them.

Each dot is an equation, in program order from left to right. A line leads from a value to its
reader; where the line changes the lane, the value is cast. Parameters are left out.
```

In short: {{ summary }}.

## The program

```{literalinclude} ../tools/transformer_block.py
:start-after: "# --- the program ---"
:end-at: "return x + mlp"
:lineno-match:
```

## What runs in which dtype

{{ totals }}

The dtypes are those in which an equation reads its float operands and returns its results. The
cause follows the reason. [Why a value has its dtype](../reasons.md) explains the codes. Click a
line to open its table.

```{fold-tables}
```

{% for title, rows in sections -%}
### {{ title }}

{{ count(rows) }}:

| line | equation | result | reads | gives | reason |
|---|---|---|---|---|---|
{% for row in rows -%}
| {{ line(row) }} | `{{ row.primitive }}` | {{ shape(row) }} | {{ dtypes(row.operands) }} | \
{{ dtypes(row.results) }} | `{{ row.reason }}`{{ " " if row.cause }}{{ row.cause }} |
{% endfor %}
{% endfor -%}
## What to look at

* **The norms are float32.** `x` is an input of the program as large as the result. It has a vote,
  and it votes for float32, as in PyTorch. The second norm reads the residual stream, which is
  float32 for the same reason.
* **Biases and scales do not widen.** `up_bias` is a float32 parameter, smaller than the sum. It has
  no vote, so the sum stays in bfloat16, and the GELU after it, too.
* **`div` by 4 is a `FEEDER`.** Its operand is a bfloat16 matmul, but all readers of its result run
  in float32. So the division runs in float32, too: this costs nothing, and the scores are not
  rounded again.
* **The mask stays finite.** `finfo(float32).min` becomes the lowest number of bfloat16, not -inf,
  so that a row that is masked throughout does not become NaN.
* **The softmax runs in float32.** Its probabilities are cast once, for the matmul that reads them.

## The same block at other levels

The equations that [another level](policies.md#levels) runs in other dtypes than the default, `o1`:

| level | 16-bit equations | casts down | casts up | other dtypes than at `o1` |
|---|---|---|---|---|
{% for level, low, down, up, changed in levels -%}
| `{{ level }}` | {{ low }} | {{ down }} | {{ up }} | {{ changed }} |
{% endfor -%}
"""


def render() -> str:
    """Returns the text of the page."""
    reports = {
        level: explain(
            transformer_block.block, *transformer_block.shapes(), policy=BF16.with_level(level)
        )
        for level in _LEVELS
    }
    report = reports["o1"]
    casts = report.totals.casts
    copies = report.totals.cast_parameters
    totals = (
        f"{copies} of the {report.totals.parameters} parameter arrays are cast to bfloat16, once "
        f"each. Of computed values there are {casts.down - copies} casts to bfloat16 and "
        f"{casts.up} back to float32."
    )
    levels = []
    for level, other in reports.items():
        low = sum("bfloat16" in row.results for row in other.rows)
        changed = len(report.diff(other))
        levels.append((level, low, other.totals.casts.down, other.totals.casts.up, changed))
    environment = jinja2.Environment(
        keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    return environment.from_string(_TEMPLATE).render(
        summary=report.summary.partition(": ")[2],
        totals=totals,
        sections=_sections(report.rows),
        levels=levels,
        count=_count,
        line=lambda row: _line(row) or "",
        shape=lambda row: " ".join(map(_shape, row.result_shapes)),
        dtypes=lambda names: ", ".join(dict.fromkeys(_SHORT.get(n, n) for n in names)),
    )


def _count(rows: Sequence[Row]) -> str:
    low = sum("bfloat16" in row.results for row in rows)
    return f"{len(rows)} equation{'s'[: len(rows) > 1]}, {low} with a bfloat16 result"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"  # noqa: RUF001


def _sections(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Groups the rows by the function that they stand in; calls of it are numbered."""
    sections: list[tuple[str, list[Row]]] = []
    seen: dict[str, int] = {}
    for row in rows:
        found = re.search(r"\((\w+)\)$", row.source)
        name = found[1] if found else sections[-1][0].partition(",")[0].strip("`")
        if not sections or sections[-1][0].partition(",")[0] != f"`{name}`":
            seen[name] = seen.get(name, 0) + 1
            ordinal = {1: "", 2: ", again"}[seen[name]]
            sections.append((f"`{name}`{ordinal}", []))
        sections[-1][1].append(row)
    return sections


def _line(row: Row) -> str:
    """The line of the program, such as ``24``; nothing inside a call."""
    found = re.search(re.escape(_SOURCE.name) + r":(\d+)", row.source)
    return found[1] if found else ""


def main(arguments: Sequence[str] | None = None, page: pathlib.Path = PAGE) -> int:
    """Writes or checks the page; returns the exit status."""
    return run(render, page, "generate_block.py", arguments)


if __name__ == "__main__":
    sys.exit(main())
