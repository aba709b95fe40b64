"""Writes docs/primitives.md from the policy tables of the package.

    python docs/tools/generate_primitives.py           # writes the page
    python docs/tools/generate_primitives.py --check   # exits with 1 if the page is out of date

The page depends on the tables alone, not on the JAX that is installed.
"""

from __future__ import annotations

import pathlib
import sys
import textwrap
from collections.abc import Iterable, Sequence

from jmp_autocast.policies import DATA_MOVEMENT, DEFAULT_RULES, STRUCTURAL, CastPolicy

PAGE = pathlib.Path(__file__).parents[1] / "primitives.md"
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where a test imports this file

from pages import run  # noqa: E402

_INTRODUCTION = """\
<!-- Written by docs/tools/generate_primitives.py from policies/tables.py: edit those. -->

# The policy of each primitive

The defaults. `Policy.with_rules` changes them for one program, and `register_rule` adds the
primitives of another package. `explain` lists the primitives of a program that have no policy.
"""

_SECTIONS: dict[CastPolicy, str] = {
    CastPolicy.LOWER_PRECISION_FP: "Float operands are cast to the compute dtype.",
    CastPolicy.FP32: "Float operands are cast to float32; the result is float32.",
    CastPolicy.FP32_SET_OPT_DTYPE: (
        "Reductions: they accumulate in float32 and return float32. A cast of the result by the "
        "program is an equation of its own, which `autocast` keeps."
    ),
    CastPolicy.FP32_APPEND_DTYPE: (
        "Their update computation has a fixed dtype: they are emitted again in the float32 form. "
        "A matmul or convolution with this policy returns its float32 accumulator."
    ),
    CastPolicy.PROMOTE: (
        "Between products, operands are cast to the widest dtype among those that vote, else to "
        "float32. Computed values vote, and so do "
        "parameters, constants and arguments whose rounding costs more than rounding the result."
    ),
}

_KEEP = (
    "All others keep the dtypes that the program declares: random bits, keys, callbacks, refs, "
    "sparse arrays, collectives that start or finish a transfer, bit operations and foreign code."
)

_RULES = "These rules decide for each equation by its shapes and parameters."

_DATA_MOVEMENT = (
    "Also `PROMOTE`. They move or replicate the elements of one operand and follow its dtype. A "
    "parameter is cast first, while it is small."
)

_STRUCTURAL = (
    "They hold jaxprs, or are casts themselves, and have no policy: use a scope for the region, or "
    "a rule function that returns `Decision(emit=...)` to replace the equation."
)


def render() -> str:
    """Returns the text of the page."""
    functions = {name: rule for name, rule in DEFAULT_RULES.items() if callable(rule)}
    parts = [_INTRODUCTION, "## Rule functions", _wrap(_RULES)]
    rows = [f"| `{name}` | {_first_line(functions[name])} |" for name in sorted(functions)]
    parts.append("\n".join(["| primitive | rule |", "|---|---|", *rows]))
    for policy, text in _SECTIONS.items():
        names = {n for n, rule in DEFAULT_RULES.items() if rule is policy} - DATA_MOVEMENT
        parts += [f"## {policy.name}", _wrap(text), _names(names)]
    parts += ["## Data movement", _wrap(_DATA_MOVEMENT), _names(DATA_MOVEMENT)]
    parts += ["## Structural", _wrap(_STRUCTURAL), _names(STRUCTURAL)]
    parts += ["## KEEP", _wrap(_KEEP)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _first_line(rule: object) -> str:
    return (rule.__doc__ or "").splitlines()[0].replace("``", "`")


def _names(names: Iterable[str]) -> str:
    return _wrap(", ".join(f"`{name}`" for name in sorted(names)))


def _wrap(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


def main(arguments: Sequence[str] | None = None, page: pathlib.Path = PAGE) -> int:
    """Writes or checks the page; returns the exit status."""
    return run(render, page, "generate_primitives.py", arguments)


if __name__ == "__main__":
    sys.exit(main())
