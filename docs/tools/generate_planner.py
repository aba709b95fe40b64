"""Fills the tables of docs/concepts/planner.md that the planner's code decides.

    python docs/tools/generate_planner.py           # writes the page
    python docs/tools/generate_planner.py --check   # exits with 1 if the page is out of date

What stands between ``<!-- NAME -->`` and ``<!-- end -->`` is written here; the rest by hand.
"""

from __future__ import annotations

import inspect
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence

from jmp_autocast.interpreters.plan.equation import DECISIONS, GUARDS, PROMOTIONS
from jmp_autocast.interpreters.plan.needs import ROWS, Need
from jmp_autocast.interpreters.plan.requests import ASKS, REFUSES
from jmp_autocast.interpreters.primitives.traits import TRAITS, having

PAGE = pathlib.Path(__file__).parents[1] / "concepts" / "planner.md"
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where a test imports this file

from pages import filled, run  # noqa: E402

_MOST_NAMES = 9  # of the primitives in a cell
_MEANING = re.compile(r"^ *([A-Z_0-9]+): (.+)\.$", re.MULTILINE)


def needs() -> str:
    """Returns the table of needs: one row for each row of the planner's."""
    meanings = dict(_MEANING.findall(Need.__doc__ or ""))
    lines = ["| need | what reads the value | asked by | raised | without it |", "|---" * 5 + "|"]
    for row in ROWS:
        name = row.need.name or ""
        raised = _names(row.raises) or "-"
        if row.raises >= TRAITS.keys() - having("contracts"):
            raised = "all" if row.raises >= TRAITS.keys() else "all but products"
        asked_by = _names(row.primitives)
        lines.append(f"| `{name}` | {meanings[name]} | {asked_by} | {raised} | {row.why} |")
    return "\n".join(lines)


def _names(primitives: Iterable[str]) -> str:
    names, products = set(primitives), having("contracts")
    rest = [f"`{p}`" for p in sorted(names - products if names >= products else names)]
    if len(rest) > _MOST_NAMES:
        rest[_MOST_NAMES - 1] += f" and {len(rest) - _MOST_NAMES} more"
    return ", ".join((["products"] if names >= products else []) + rest[:_MOST_NAMES])


def _listed(functions: Sequence[Callable[..., object]]) -> str:
    """Returns what each function does, and what goes wrong without it where it says so."""
    lines = []
    for i, function in enumerate(functions, 1):
        first, *others = (inspect.getdoc(function) or "").split("\n\n")
        harm = next((text for text in others if text.startswith("Without it")), "")
        said = " ".join(f"{first.partition(chr(10))[0]} {harm}".split())
        lines.append(f"{i}. {said.replace('``', '`')}")
    return "\n".join(lines)


_SECTIONS: dict[str, Callable[[], str]] = {
    "needs": needs,
    "asks": lambda: _listed(ASKS),
    "refuses": lambda: _listed(REFUSES),
    "decisions": lambda: _listed([link.decides for link in DECISIONS]),
    "guards": lambda: _listed([link.decides for link in GUARDS]),
    "promotions": lambda: _listed([link.decides for link in PROMOTIONS]),
}


def render() -> str:
    """Returns the text of the page."""
    return filled(PAGE, _SECTIONS)


def main(arguments: Sequence[str] | None = None, page: pathlib.Path = PAGE) -> int:
    """Writes or checks the page; returns the exit status."""
    return run(render, page, "generate_planner.py", arguments)


if __name__ == "__main__":
    sys.exit(main())
