"""Runs programs in both compute dtypes: ``python -m tests.third_party [pattern of names]``."""

import re
import sys

from .check import Comparison, matrix_products
from .tables import PROGRAMS


def report(name):
    """A line: dots in the compute dtype, and the result that is off most."""
    comparison = Comparison(name, PROGRAMS[name])
    line, fine = f"{name:50}", True
    for dtype in ("bfloat16", "float16"):
        low = comparison.low(dtype)
        same = (low.avals, low.tree) == (comparison.plain.avals, comparison.plain.tree)
        dots = matrix_products(low.jaxpr)
        lowered = sum(lhs == rhs == dtype for lhs, rhs in dots)
        found = comparison.errors(low, dtype)
        errors = [(e / (allowed or 1e-30), path) for path, e, allowed in found]
        ratio, path = max(errors)
        good = bool(same and lowered and ratio <= 1)
        fine &= good
        line += f" {dtype} {'ok' if good else 'WRONG':5} {lowered}/{len(dots)} {ratio:.2f} {path}"
    return line, fine


def main(pattern=""):
    failed = False
    for name in PROGRAMS:
        if re.search(pattern, name):
            line, fine = report(name)
            failed |= not fine
            print(line, flush=True)
    return failed


sys.exit(main(*sys.argv[1:2]))
