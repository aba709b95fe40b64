"""The command of a fuzzer: programs by their numbers, one after the other."""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Callable, Iterable, Sequence

import jax


def run_many(
    name: str,
    check: Callable[[int, int, str], tuple[str, str]],
    argv: Sequence[str] | None,
    kinds: Iterable[str] = (),
) -> int:
    """Runs programs and prints what is wrong; returns whether anything is.

    Args:
        name: The module of the fuzzer.
        check: From the seed, the number of a program and the one kind of programs to the kind that
            was drawn and what is wrong with it.
        argv: The arguments of the command.
        kinds: The kinds that can be chosen.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz.{name}")
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first program")
    parser.add_argument("--only", default="", choices=["", *kinds], help="the one kind of programs")
    options = parser.parse_args(argv)
    start, drawn, failed = time.monotonic(), collections.Counter(), 0
    for index in range(options.start, options.start + options.programs):
        kind, wrong = check(options.seed, index, options.only)
        drawn[kind] += 1
        if wrong:
            failed += 1
            only = f" --only {options.only!r}" if options.only else ""
            print(f"FAILED --seed {options.seed} --start {index} --programs 1{only}")
            print(f"{kind}: {wrong}\n", flush=True)
        if index % 50 == 49:
            jax.clear_caches()
    counts = ", ".join(f"{kind} {n}" for kind, n in drawn.most_common())
    seconds = time.monotonic() - start
    print(f"{options.programs} programs ({counts}), {failed} failed, {seconds:.0f} s")
    return int(failed > 0)
