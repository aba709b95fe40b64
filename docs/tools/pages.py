"""What the generators of pages share: to write a page, or to check that it is up to date."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence


def filled(page: pathlib.Path, sections: Mapping[str, Callable[[], str]]) -> str:
    """Returns the text of a page with what stands between ``<!-- NAME -->`` and ``<!-- end -->``.

    Args:
        page: Its file.
        sections: From each name to what returns the text there.
    """
    text = page.read_text(encoding="utf-8")
    for name, section in sections.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found:
            raise LookupError(f"{page} has no line {begin.strip()}. Add it, and {end.strip()}.")
        text = before + begin + section() + "\n" + end + rest.partition(end)[2]
    return text


def run(
    render: Callable[[], str], page: pathlib.Path, script: str, arguments: Sequence[str] | None
) -> int:
    """Writes or checks a page.

    Args:
        render: Returns the text of the page.
        page: Its file.
        script: The name of the generator in docs/.
        arguments: The command line, None for that of the process.

    Returns:
        The exit status: 1 if the page is out of date.
    """
    parser = argparse.ArgumentParser(description=f"Writes docs/{page.name}.")
    parser.add_argument("--check", action="store_true", help="only compare; 1 if they differ")
    check = parser.parse_args(arguments).check
    text = render()
    if not check:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page} is out of date: run python docs/tools/{script}", file=sys.stderr)
    return 1
