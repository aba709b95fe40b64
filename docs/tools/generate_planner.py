"""Fills the table of docs/needs.md from the code of the planner.

    python docs/tools/generate_planner.py           # writes the page
    python docs/tools/generate_planner.py --check   # exits with 1 if the page is out of date

The text between ``<!-- NAME -->`` and ``<!-- end -->`` is written here; the rest by hand.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Sequence

from jmp_autocast.interpreters.plan.needs import ROWS, Need

PAGE = pathlib.Path(__file__).parents[1] / "needs.md"
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where a test imports this file

from pages import filled, run  # noqa: E402

_MEANING = re.compile(r"^ *([A-Z_0-9]+): (.+)\.$", re.MULTILINE)


def needs() -> str:
    """Returns the table of needs: one row for each row of the planner's."""
    meanings = dict(_MEANING.findall(Need.__doc__ or ""))
    lines = ["| need | consumer | without it |", "|---" * 3 + "|"]
    for row in ROWS:
        name = row.need.name or ""
        lines.append(f"| `{name}` | {meanings[name]} | {row.why} |")
    return "\n".join(lines)


def render() -> str:
    """Returns the text of the page."""
    return filled(PAGE, {"needs": needs})


def main(arguments: Sequence[str] | None = None, page: pathlib.Path = PAGE) -> int:
    """Writes or checks the page; returns the exit status."""
    return run(render, page, "generate_planner.py", arguments)


if __name__ == "__main__":
    sys.exit(main())
