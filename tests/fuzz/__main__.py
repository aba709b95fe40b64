"""``python -m tests.fuzz --programs 1000 --seed 0 --jobs 2``: checks random programs."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from .campaign import Outcome, run_chunk
from .properties import PROPERTIES, SHARES

CHUNK = 25


def finished_chunks(
    work: Callable[..., list[Outcome]], chunks: list[tuple[int, int]], jobs: int
) -> Iterator[list[Outcome]]:
    """Runs the chunks, in processes of their own if there are several jobs."""
    if jobs < 2:
        yield from (work(*chunk) for chunk in chunks)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for future in concurrent.futures.as_completed([pool.submit(work, *c) for c in chunks]):
            yield future.result()


def report(console: Console, outcome: Outcome) -> None:
    for failure in outcome.failures:
        where = f"--seed {outcome.seed} --start {outcome.index} --programs 1"
        console.print(f"FAILED {failure.property} ({where})", style="bold red")
        console.print(failure.message[:3000], markup=False, highlight=False)
    if outcome.report:
        console.print(outcome.report, markup=False, highlight=False)


def summarize(console: Console, outcomes: list[Outcome], seconds: float) -> None:
    tried = collections.Counter(name for o in outcomes for name in o.properties)
    without = collections.Counter(name for o in outcomes for name in o.without)
    failed = collections.Counter(f.property for o in outcomes for f in o.failures)
    table = Table("property", "tried", "not applicable", "failed", title="Programs")
    for name in PROPERTIES:
        table.add_row(name, *(str(c[name]) for c in (tried, without, failed)))
    console.print(table)
    families = collections.Counter(name for o in outcomes for name in o.families)
    console.print("statements:", ", ".join(f"{n} {c}" for n, c in families.most_common()))
    allowed = [a for o in outcomes for a in o.allowed if a < float("inf")]
    total = sum(len(o.allowed) for o in outcomes)
    if len(allowed) > 1:
        low, middle, high = statistics.quantiles(allowed, n=4)
        console.print(
            f"allowed error, relative to a result's largest element: quartiles {low:.2g}, "
            f"{middle:.2g}, {high:.2g}; bounded: {len(allowed)} of {total} results"
        )
    cpu = sum(o.seconds for o in outcomes) / max(len(outcomes), 1)
    console.print(f"{len(outcomes)} programs, {seconds:.0f} s, {cpu:.2f} s of CPU per program")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first program")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], choices=list(PROPERTIES), metavar="NAME",
                        help=f"properties: {', '.join(PROPERTIES)}")  # fmt: skip
    options = parser.parse_args(argv)
    console = Console(soft_wrap=True)
    shares = dict.fromkeys(options.only, 1.0) if options.only else SHARES
    work = functools.partial(run_chunk, options.seed, shares)
    end = options.start + options.programs
    chunks = [(i, min(CHUNK, end - i)) for i in range(options.start, end, CHUNK)]
    outcomes: list[Outcome] = []
    start = time.monotonic()
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"seed {options.seed}", total=options.programs)
        for finished in finished_chunks(work, chunks, options.jobs):
            progress.advance(task, len(finished))
            outcomes += finished
            for outcome in finished:
                report(console, outcome)
            if not console.is_terminal:  # the bar is drawn once, at the end
                console.print(f"{len(outcomes)} of {options.programs} programs")
    summarize(console, outcomes, time.monotonic() - start)
    failed = sum(bool(o.failures) for o in outcomes)
    console.print(f"{failed} failed" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
