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
from tests.conformance.runner import Outcome, comparable, disagreeing, outcomes  # noqa: E402
from tests.support.torch_ops import DTYPES  # noqa: E402

_TEMPLATE = """\
<!-- Written by docs/tools/generate_torch_differences.py from tests/conformance: edit that. -->

# Differences from PyTorch's autocast

The output dtypes of {{ total }} calls of PyTorch 2.13 under CUDA autocast, compared with those of
the same calls in JAX under `autocast(..., output_dtype="computed")`. Each call is compared in up to
five cases: {{ cases | join(", ") }}.

| compute dtype | calls that agree in all cases | cases that agree |
|---|---|---|
{% for dtype, rows, of, cases, of_cases in shares -%}
| {{ dtype }} | {{ rows }} of {{ of }}, {{ percent(rows, of) }} | {{ cases }} of {{ of_cases }}, \
{{ percent(cases, of_cases) }} |
{% endfor %}
A 16-bit input is the result of a matmul in the program. Weights and biases are parameters
(`params=`), as in PyTorch's modules; in the other cases inputs are arguments. Arguments that are
declared in 16 bits agree in about three quarters of the calls, because `jax.numpy` casts the
results of its sums back to the dtype of the arguments.

PyTorch computes `elu`, `var`, `logaddexp`, `atan`, `scatter_add` and others in float32 and rounds
the result to 16 bits. Here it stays float32 inside the program, as do elementwise operations after
the last product, and is rounded when returned.

## Calls that differ

{% for text, _ in families -%}
{{ (loop.index ~ ". " ~ text) | wrap_number }}
{% endfor %}
| reason | PyTorch | JAX | inputs in 16 bits | PyTorch returns, here |
|---|---|---|---|---|
{% for _, differing in families -%}
{% set number = loop.index -%}
{% for call, expression, cases, want, got in differing -%}
| {{ number }} | `{{ call }}` | `{{ expression }}` | {{ cases }} | {{ want }}, {{ got }} |
{% endfor -%}
{% endfor %}
## Calls without a comparison
{% for op, reason in no_result %}
{{ ("* `" + op + "`: " + reason) | wrap_item }}
{%- endfor %}
{{ ("* Linear algebra in 16 bits: " + no_kernel) | wrap_item }}
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
        if found := [o for op in ops for o in differing.get(op, ())]:
            families.append((text, _grouped(found)))
    environment = jinja2.Environment(
        keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    environment.filters["wrap_number"] = lambda text: _wrap(text, "   ")
    environment.filters["wrap_item"] = lambda text: _wrap(text, "  ")
    return environment.from_string(_TEMPLATE).render(
        total=len(load_rows()),
        cases=CASES.values(),
        shares=shares,
        families=families,
        no_result=NO_RESULT.items(),
        no_kernel=NO_KERNEL,
        no_float16=NO_FLOAT16,
        percent=lambda part, whole: f"{100 * part / whole:.1f} %",
    )


_SHORT = {case: text.removesuffix(" in 16 bits") for case, text in CASES.items()}


def _grouped(differing: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Returns one line of cells for each call and pair of dtypes, with its cases."""
    cases: dict[tuple[str, ...], list[str]] = {}
    for o in differing:
        want, got = ("16 bits" if dtype in DTYPES else dtype for dtype in (o.want, o.got))
        cases.setdefault((o.row.torch_call, o.row.expression, want, got), []).append(_SHORT[o.case])
    return [(*key[:2], "; ".join(names), *key[2:]) for key, names in cases.items()]


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def main(arguments: Sequence[str] | None = None, page: pathlib.Path = PAGE) -> int:
    """Writes or checks the page; returns the exit status."""
    return run(render, page, "generate_torch_differences.py", arguments)


if __name__ == "__main__":
    sys.exit(main())
