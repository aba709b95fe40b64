"""Searches the candidates of `tune` for the few that need float32.

The search knows nothing of programs: it calls a test that decides whether a set of candidates
passes. The returned set has passed the test. If the search ends within its limit of runs, and all
supersets of a passing set pass, the returned set would fail without any one of its candidates.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence

Test = Callable[[frozenset[int]], bool]


def run_bound(candidates: int) -> int:
    """Returns the limit of trial runs, including those that keep no candidate or all of them."""
    # One round of `find_needed` finds the shortest passing prefix in at most 2 * log2(candidates)
    # runs: `_shortest` doubles its steps, then halves its interval. The limit leaves ten more runs
    # to test whether candidates can be removed from the set.
    return math.floor(2 * math.log2(max(candidates, 1)) + 10)


def find_needed(
    sizes: Sequence[float], share: float, passes: Test, may_run: Callable[[], bool]
) -> tuple[int, ...]:
    """Returns a set of candidates that passes.

    The candidates are sorted by predicted error, the largest first. Each round searches the
    shortest prefix that passes together with the candidates found so far. The last candidate of
    this prefix is needed, and the next round searches before it. This is delta debugging (Zeller
    and Hildebrandt, 2002) in the form of Junker's QuickXplain (2004). The prefix that a round tests
    first is chosen by the predicted errors.

    Args:
        sizes: The predicted error of each candidate; errors are assumed to be independent.
        share: The tolerance as a share of the total error.
        passes: The test of a set of candidates.
        may_run: Returns whether one more test may be made.

    Example:
        >>> find_needed([0.0, 3.0, 0.1, 4.0], 0.1, {1, 3}.issubset, lambda: True)
        (1, 3)
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    # Squares of independent errors add up.
    squares = [x * x for x in sizes]
    total = sum(squares)
    limit = share * share * total if math.isfinite(total) else sys.float_info.max
    found: list[int] = []
    end, trusted = len(order), True  # the first `end` candidates pass together with `found`
    while end and may_run():
        known = frozenset(found)
        if found and passes(known):
            end = 0
            break
        left = (0.0 if i in found else squares[i] for i in reversed(order))
        errors = [*itertools.accumulate(left, initial=0.0)][::-1]
        guess = next((n for n in range(end) if errors[n] <= limit), end - 1)
        guess = guess if trusted else end // 2
        test = lambda n, known=known: passes(known | {*order[:n]})  # noqa: E731
        size = _shortest(end, guess, 1 if trusted else end, test, may_run)
        trusted = trusted and size <= 2 * guess + 1
        # If the predictions hold, all candidates of this prefix are needed, and the search ends. An
        # infinite size is no prediction: values out of range may be harmless.
        if found and size == end and trusted and math.isfinite(sizes[order[0]]):
            break
        end = size
        if end:
            end -= 1
            found.append(order[end])
    found += order[:end]
    # If the test is not monotone, a candidate may be unnecessary once later ones are kept.
    for candidate in tuple(found):
        is_sure = trusted and math.isfinite(sizes[candidate])
        if not is_sure and len(found) > 1 and may_run() and passes(frozenset(found) - {candidate}):
            found.remove(candidate)
    return tuple(found)


def _shortest(
    end: int,
    guess: int,
    step: int,
    passes: Callable[[int], bool],
    may_run: Callable[[], bool],
) -> int:
    """Returns the smallest size of a prefix that passes.

    From a guess, the search doubles its steps until it has a size that fails and a size that
    passes. Then it halves the interval between the two.

    Args:
        end: A size that is known to pass.
        guess: The first size to test, less than ``end``.
        step: The first step from ``guess``.
        passes: The test of a size.
        may_run: Returns whether one more test may be made. If not, the smallest size that has
            passed so far is returned.
    """
    fails, size = -1, end
    while size - fails > 1 and may_run():
        middle = guess if fails < guess < size else (size + fails) // 2
        if passes(middle):
            size, guess = middle, middle - step
        else:
            fails, guess = middle, middle + step
        step *= 2
    return size
