"""The search of `tune`: which few of many candidates have to be kept in float32.

It knows nothing of programs. A test says whether a set of candidates passes. Where the test is
monotone (whatever contains a set that passes, passes), the result is smallest; that the search ends
and that its result passes does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Test = Callable[[frozenset[int]], bool]


def run_bound(culprits: int, candidates: int) -> int:
    """Returns how many runs a search takes at most for a monotone test.

    Args:
        culprits: The number of candidates that have to be kept.
        candidates: The number of candidates.
    """
    return math.floor(2 * culprits * math.log2(max(candidates, 1)) + 10)


def find_culprits(
    order: Sequence[int],
    passes: Test,
    may_run: Callable[[int], bool] = lambda culprits: True,
) -> tuple[int, ...]:
    """Returns candidates that pass together, and none of which can be left out.

    The shortest prefix of the order that passes, together with what was found before, ends in a
    culprit; the next one stands before it. This is delta debugging (Zeller and Hildebrandt, 2002)
    in the form of Junker's QuickXplain (2004), and the order is a guess of who it is. It always
    ends, and what it returns has passed, also where the test is not monotone.

    Args:
        order: The candidates, the most suspicious first. All together pass.
        passes: The test of a set of candidates.
        may_run: Whether there may be one more run, given the number of culprits. It is asked where
            a run is no longer part of the search, but may make the result smaller.

    Example:
        >>> find_culprits(range(1000), {3, 700}.issubset)
        (700, 3)
    """
    found: list[int] = []
    end = len(order)  # what was found and this prefix have passed together
    while end:
        known = frozenset(found)
        end = _shortest(end, lambda size, known=known: passes(known | {*order[:size]}))
        if end:
            end -= 1
            found.append(order[end])
    for candidate in tuple(found):
        if len(found) > 1 and may_run(len(found)) and passes(frozenset(found) - {candidate}):
            found.remove(candidate)
    return tuple(found)


def _shortest(end: int, passes: Callable[[int], bool]) -> int:
    """Returns the least size that passes, found by doubling steps and then by halves.

    Args:
        end: A size that is known to pass.
        passes: The test of a size.
    """
    fails, size = -1, 0
    while size < end and not passes(size):
        fails, size = size, 2 * size + 1
    size = min(size, end)
    while size - fails > 1:
        middle = (size + fails) // 2
        if passes(middle):
            size = middle
        else:
            fails = middle
    return size
