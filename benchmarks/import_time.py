"""How long ``import jmp_autocast`` takes, as a ratio to ``import jax, optax``, which it needs.

    python benchmarks/import_time.py --rounds 20 --limit 1.3

Every import is in a fresh process, the two in turn, after one of each that fills the caches: with
the bytecode that pip leaves beside an installed package, also where this shell turns it off. With
``--limit`` the exit status is 1 if the ratio of the fastest ones is above it: the fastest are the
least disturbed by what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

STATEMENTS = {"needed": "import jax, optax", "package": "import jmp_autocast"}
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def seconds(statement: str, bytecode: str) -> float:
    """Returns how long a statement takes in a fresh process, whose bytecode is in that folder."""
    command = [sys.executable, "-c", TIMED.format(statement)]
    shell = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env = shell | {"PYTHONPYCACHEPREFIX": bytecode}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return float(run.stdout)


def measure(rounds: int) -> dict[str, list[float]]:
    """Returns the times of both imports, one of each per round."""
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    with tempfile.TemporaryDirectory() as bytecode:
        for i in range(rounds + 1):
            for name in list(STATEMENTS)[:: -1 if i % 2 else 1]:
                taken = seconds(STATEMENTS[name], bytecode)
                if i:
                    times[name].append(taken)
    return times


def main(arguments: Sequence[str]) -> int:
    """Prints both times and their ratio; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, help="exit with 1 above this ratio")
    options = parser.parse_args(arguments)
    times = measure(options.rounds)
    for name, statement in STATEMENTS.items():
        taken = times[name]
        print(f"{statement:20} min {min(taken):.3f} s, median {statistics.median(taken):.3f} s")
    best, median = (of(times["package"]) / of(times["needed"]) for of in (min, statistics.median))
    print(f"{'ratio':20} min {best:.2f}, median {median:.2f}")
    return int(options.limit is not None and best > options.limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
