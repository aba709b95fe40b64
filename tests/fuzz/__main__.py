"""``python -m tests.fuzz --programs 1000 --seed 0 --jobs 2``: checks random programs."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator

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


def report(outcome: Outcome) -> None:
    for failure in outcome.failures:
        where = f"--seed {outcome.seed} --start {outcome.index} --programs 1"
        print(f"FAILED {failure.property} ({where})\n{failure.message[:3000]}")
    if outcome.report:
        print(outcome.report)


def summarize(outcomes: list[Outcome], seconds: float) -> None:
    tried = collections.Counter(name for o in outcomes for name in o.properties)
    without = collections.Counter(name for o in outcomes for name in o.without)
    failed = collections.Counter(f.property for o in outcomes for f in o.failures)
    for name in PROPERTIES:
        counts = f"{tried[name]:6} tried {without[name]:6} not applicable {failed[name]:4} failed"
        print(f"{name:14} {counts}")
    cpu = sum(o.seconds for o in outcomes) / max(len(outcomes), 1)
    print(f"{len(outcomes)} programs, {seconds:.0f} s, {cpu:.2f} s of CPU per program")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first program")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], choices=list(PROPERTIES), metavar="NAME",
                        help=f"properties: {', '.join(PROPERTIES)}")  # fmt: skip
    options = parser.parse_args(argv)
    shares = dict.fromkeys(options.only, 1.0) if options.only else SHARES
    work = functools.partial(run_chunk, options.seed, shares)
    end = options.start + options.programs
    chunks = [(i, min(CHUNK, end - i)) for i in range(options.start, end, CHUNK)]
    outcomes: list[Outcome] = []
    start = time.monotonic()
    for finished in finished_chunks(work, chunks, options.jobs):
        outcomes += finished
        for outcome in finished:
            report(outcome)
        print(f"{len(outcomes)} of {options.programs} programs", flush=True)
    summarize(outcomes, time.monotonic() - start)
    failed = sum(bool(o.failures) for o in outcomes)
    print(f"{failed} failed" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
