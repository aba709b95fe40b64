"""Breaks the package in one line at a time, and says which breaks the tests do not see.

    python -m tests.project.mutations                      # all of mutations.toml
    python -m tests.project.mutations --only "carries:*"   # by name
    python -m tests.project.mutations --jobs 2

Each mutation of `mutations.toml` holds a file of the package, a text that is in it once, the text
in its place, and the tests that shall fail. A text that has moved is looked for in the whole
package. The tests run on a copy of the tree, which alone is changed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
TABLE = pathlib.Path(__file__).with_name("mutations.toml")
LIMIT = 1800  # seconds; a program that no longer ends is found, too
FOUND, SURVIVED, NO_TEST, LOST = "found", "SURVIVED", "NO TEST RAN", "LOST"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One broken line: see the module's docstring."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def load(pattern: str) -> list[Mutation]:
    """Returns the mutations whose names match."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**row) for row in rows if fnmatch.fnmatch(row["name"], pattern)]


def place_of(mutation: Mutation, package: pathlib.Path) -> pathlib.Path | None:
    """Returns the one file that holds the text, None if there is none or there are several."""
    named = package / mutation.file
    files = [named] if named.is_file() and mutation.old in named.read_text() else []
    files = files or [p for p in package.rglob("*.py") if mutation.old in p.read_text()]
    if len(files) != 1 or files[0].read_text().count(mutation.old) != 1:
        return None
    return files[0]


def check(mutation: Mutation, tree: pathlib.Path) -> tuple[str, str]:
    """Runs a mutation's tests in a copy of the tree; returns what became of it, and who saw it."""
    place = place_of(mutation, tree / "jmp_autocast")
    if place is None:
        return LOST, "the text is not in the package, or not once"
    whole = place.read_text()
    place.write_text(whole.replace(mutation.old, mutation.new))
    tests = [f"tests/{name}" for name in mutation.tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return FOUND, "it does not end"
    finally:
        place.write_text(whole)
    if done.returncode not in (0, 1):  # no test was collected, or the package cannot be imported
        return NO_TEST, (done.stdout + done.stderr)[-500:]
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return (FOUND if done.returncode else SURVIVED), failed[1] if failed else " ".join(tests)


def copied(folder: pathlib.Path) -> pathlib.Path:
    """Returns a copy of the tree."""
    kept_out = shutil.ignore_patterns(".git", ".venv*", ".nox", "_build", "__pycache__", ".pytest*")
    return pathlib.Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=kept_out))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of names, as in a shell")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(argv)
    mutations = load(options.only)
    counts = dict.fromkeys((FOUND, SURVIVED, NO_TEST, LOST), 0)
    with tempfile.TemporaryDirectory() as scratch:
        trees: queue.Queue[pathlib.Path] = queue.Queue()
        for job in range(options.jobs):
            trees.put(copied(pathlib.Path(scratch) / str(job)))

        def run(mutation: Mutation) -> tuple[Mutation, str, str, float]:
            tree, start = trees.get(), time.monotonic()
            try:
                return mutation, *check(mutation, tree), time.monotonic() - start
            finally:
                trees.put(tree)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for mutation, outcome, said, seconds in pool.map(run, mutations):
                counts[outcome] += 1
                print(f"{outcome:8} {seconds:5.0f} s  {mutation.name}\n{'':18}{said}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts[FOUND] < len(mutations))


if __name__ == "__main__":
    sys.exit(main())
