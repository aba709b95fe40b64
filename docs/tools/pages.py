"""What the generators of pages share: to write a page, or to check that it is up to date."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence


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
