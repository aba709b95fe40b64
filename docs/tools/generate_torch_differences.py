"""Writes docs/pytorch_differences.md from the conformance rows in tests/conformance.

python docs/tools/generate_torch_differences.py           # writes the page
python docs/tools/generate_torch_differences.py --check   # exits with 1 if it is out of date

Every row is run, which takes some seconds. The page does not depend on the JAX that is installed.
"""

from __future__ import annotations

import pathlib
import sys
import textwrap
from collections.abc import Sequence

import jinja2

PAGE = pathlib.Path(__file__).parents[1] / "pytorch_differences.md"
# As a script this file finds docs/ alone, and imported by a test the repository alone.
sys.path[:0] = [str(pathlib.Path(__file__).parents[n]) for n in (0, 2)]

from pages import run  # noqa: E402

from tests.conformance.differences import (  # noqa: E402
    DIFFERENCES,
    NO_FLOAT16,
    NO_KERNEL,
    NO_RESULT,
    REASONS,
)
from tests.conformance.rows import CASES, load_rows  # noqa: E402
from tests.conformance.runner import comparable, disagreeing, outcomes  # noqa: E402
from tests.support.torch_ops import DTYPES  # noqa: E402

_TEMPLATE = """\
<!-- Written by docs/tools/generate_torch_differences.py from tests/conformance: edit that. -->

# Differences from PyTorch's autocast

This page compares the output dtypes of {{ total }} calls of PyTorch 2.13 under CUDA autocast with
those of the same calls in JAX under `autocast(..., output_dtype="computed")`. Each call is a row,
and is compared in up to five cases: {{ cases | join(", ") }}.

| compute dtype | rows that agree in all their cases | cases that agree |
|---|---|---|
{% for dtype, rows, of, cases, of_cases in shares -%}
| {{ dtype }} | {{ rows }} of {{ of }}, {{ percent(rows, of) }} | {{ cases }} of {{ of_cases }}, \
{{ percent(cases, of_cases) }} |
{% endfor %}
What is compared:

* A 16-bit input is a value that a matmul of the program computed. A float32 input beside it is a
  value that the program computed in float32.
* Weights and biases are parameters (`params=`), as in PyTorch's modules. The matrix that `addmm`
  and related functions add to a product is a bias, and `prelu`'s slope is a weight.
* In the other cases the inputs are arguments of the program. Integers are compared by kind.

If the arguments of the program have 16 bits, about three quarters of the rows agree. `jax.numpy`
then casts the results of its sums and means back to the dtype of the arguments. These casts are
equations of the program, like a user's own casts, and `autocast` obeys them.

## Same dtype, other precision

Some values are computed and read in one dtype, but returned in the other if the caller asks for
the computed dtypes. With the default, `output_dtype="same"`, and inside the program, this rounds
nothing.

* PyTorch leaves `elu`, `var`, `logaddexp`, `atan`, `scatter_add` and others off its lists: they
  are float32 inside and round to 16 bits. Here their result stays float32 for its readers in the
  program, and is rounded when it is returned.
* PyTorch lists powers and nearest-neighbor resizing as float32. Here they run in 16 bits if their
  readers do (a square before a matmul), and are float32 if they are returned.

```{fold-tables}
```

## Rows that differ

Click a line to open its table.
{% for text, differing in families %}
{{ text | wrap }}

{{ differing | length }} case{{ "s" if differing | length > 1 }}:

| op | PyTorch | JAX | case | PyTorch returns | here |
|---|---|---|---|---|---|
{% for o in differing -%}
| `{{ o.row.op }}` | `{{ o.row.torch_call }}` | `{{ o.row.expression }}` | {{ names[o.case] }} | \
{{ short(o.want) }} | {{ short(o.got) }} |
{% endfor -%}
{% endfor %}
## What cannot be compared

These rows are not counted:
{% for op, reason in no_result %}
{{ ("* `" + op + "`: " + reason) | wrap_item }}
{%- endfor %}

These rows are counted without their 16-bit case:

{{ ("* Linear algebra: " + no_kernel) | wrap_item }}
{{ ("* `masked_fill` in float16: " + no_float16) | wrap_item }}
"""


def render() -> str:
    """Returns the text of the page."""
    shares, families = [], []
    for dtype in DTYPES:
        rows, cases = comparable(dtype), outcomes(dtype)
        agreeing = len(rows) - len(disagreeing(dtype))
        shares.append((dtype, agreeing, len(rows), sum(o.agrees for o in cases), len(cases)))
    differing = disagreeing(DTYPES[0])
    for key, text in REASONS.items():
        ops = [op for op in DIFFERENCES if DIFFERENCES[op] == key]
        families.append((text, [o for op in ops for o in differing.get(op, ())]))
    environment = jinja2.Environment(
        keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    environment.filters["wrap"] = _wrap
    environment.filters["wrap_item"] = lambda text: _wrap(text, "  ")
    return environment.from_string(_TEMPLATE).render(
        total=len(load_rows()),
        cases=CASES.values(),
        names=CASES,
        shares=shares,
        families=families,
        no_result=NO_RESULT.items(),
        no_kernel=NO_KERNEL,
        no_float16=NO_FLOAT16,
        percent=lambda part, whole: f"{100 * part / whole:.1f} %",
        short=lambda dtype: "16 bits" if dtype in DTYPES else dtype,
    )


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def main(arguments: Sequence[str] | None = None, page: pathlib.Path = PAGE) -> int:
    """Writes or checks the page; returns the exit status."""
    return run(render, page, "generate_torch_differences.py", arguments)


if __name__ == "__main__":
    sys.exit(main())
