"""Prints the line and the branch coverage of a `coverage json` report, each by itself.

Run as `python -m tests.project.coverage_rates coverage.json`; it exits with 1 if a rate is too low.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence

# What is counted, its totals in the report, and the least percentage. coverage's own `fail_under`
# knows only the mean of both kinds.
RATES = (
    ("line", "covered_lines", "num_statements", 95.0),
    ("branch", "covered_branches", "num_branches", 90.0),
)


def main(arguments: Sequence[str]) -> int:
    """Prints both rates; returns the exit status."""
    (path,) = arguments
    totals = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["totals"]
    status = 0
    for kind, covered, all_of_them, least in RATES:
        rate = 100 * totals[covered] / totals[all_of_them]
        enough = rate >= least
        status |= not enough
        counts = f"{totals[covered]} of {totals[all_of_them]}"
        verdict = "at least" if enough else "TOO LOW, it must be at least"
        print(f"{kind} coverage {rate:.2f} % ({counts}; {verdict} {least:g} %)")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
