"""What each row of the planner's tables is worth: ``python -m tests.project.worth_of_rows``.

One row at a time is taken out of the needs, of who asks, of what refuses and of the guards, and the
tests that hold bounds on values and dtypes run without it. A row that nothing misses goes.

    python -m tests.project.worth_of_rows                    # all rows: half an hour
    python -m tests.project.worth_of_rows --only "needs:*"   # by name
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jmp_autocast.interpreters.plan import equation, needs, requests

TESTS = ("tests/plan", "tests/scenarios", "tests/derivatives")


def rows() -> Iterator[str]:
    """Yields the name of each row, as ``table: row``."""
    yield from (f"needs: {row.need.name}" for row in needs.ROWS)
    for table, module in (("ASKS", requests), ("REFUSES", requests), ("GUARDS", equation)):
        yield from (f"{table}: {_name(one)}" for one in getattr(module, table))


def _name(row: Any) -> str:
    """Returns the name of who decides in a row: of a link of a chain, or of a function."""
    return getattr(row, "decides", row).__name__


def take_out(row: str) -> None:
    """Takes a row out of its table, in this process."""
    table, name = row.split(": ")
    if table == "needs":
        for asked in needs._ASKED.values():
            asked[:] = [one for one in asked if one.need.name != name]
        needs.ROWS = requests.ROWS = tuple(one for one in needs.ROWS if one.need.name != name)
        return
    module = equation if table == "GUARDS" else requests
    kept = tuple(one for one in getattr(module, table) if _name(one) != name)
    setattr(module, table, kept)


def missed_by(row: str, tests: Sequence[str]) -> str:
    """Returns the last line that pytest prints without a row, and its first failure.

    Raises:
        RuntimeError: The tests did not run.
    """
    code = (
        "import sys, pytest; from tests.project.worth_of_rows import take_out; "
        "take_out(sys.argv[1]); "
        "sys.exit(pytest.main([*sys.argv[2:], '-n0', '-q', '--tb=no', '-p', 'no:cacheprovider']))"
    )
    command = [sys.executable, "-c", code, row, *tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"without {row} the tests did not run:\n{done.stdout}{done.stderr}")
    lines = done.stdout.strip().splitlines()
    first = next((line.split(" - ")[0] for line in lines if line.startswith("FAILED")), "")
    return f"{lines[-1].strip('= ')} {first}".strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what misses each row; returns the number of rows that nothing misses."""
    parser = argparse.ArgumentParser("python -m tests.project.worth_of_rows", None, __doc__)
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("tests", nargs="*", default=TESTS, help="the tests that run")
    parsed = parser.parse_args(arguments)
    worthless = 0
    for row in rows():
        if fnmatch.fnmatch(row, parsed.only):
            missed = missed_by(row, parsed.tests)
            worthless += "failed" not in missed
            print(f"{row:<28} {missed}", flush=True)
    return worthless


if __name__ == "__main__":
    sys.exit(main())
