"""The search of `tune`, on sets of numbers."""

import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from jmp_autocast.inspect.tuning.search import find_needed, run_bound


class Test:
    """A test that counts its calls, each set once, as `tune` does."""

    __test__ = False

    def __init__(self, passes):
        self._passes = passes
        self.seen = {}

    def __call__(self, kept):
        if kept not in self.seen:
            self.seen[kept] = self._passes(kept)
        return self.seen[kept]


def search(sizes, passes, share=0.0, bound=None):
    """The result, after a run with nothing and one with everything kept, as in `tune`."""
    test, everything = Test(passes), frozenset(range(len(sizes)))
    bound = bound or run_bound(len(sizes))
    assert not test(frozenset())
    assert test(everything)
    found = find_needed(sizes, share, test, lambda: len(test.seen) < bound)
    assert len(set(found)) == len(found)
    assert test.seen[frozenset(found)]
    assert len(test.seen) <= bound
    return set(found), test


def predicted(units):
    """Possible predictions: also equal ones, and infinite ones."""
    return st.lists(
        st.sampled_from([0.0, 1e-3, 0.5, 1.0, 7.0, math.inf]), min_size=units, max_size=units
    )


@st.composite
def one_planted(draw):
    units = draw(st.integers(1, 300))
    return draw(predicted(units)), draw(st.integers(0, units - 1)), draw(st.floats(0, 1))


@settings(max_examples=500)
@given(one_planted())
def test_one_culprit_is_found_whatever_is_predicted(problem):
    sizes, culprit, share = problem
    assert search(sizes, {culprit}.issubset, share)[0] == {culprit}


@settings(max_examples=200)
@given(st.integers(3, 300), st.randoms(use_true_random=False))
def test_culprits_that_are_predicted(units, draw):
    """Their ranges are exceeded, and that of others without harm."""
    culprits = set(draw.sample(range(units), 3))
    suspects = culprits | {draw.randrange(units), draw.randrange(units)}
    sizes = [math.inf if i in suspects else draw.random() for i in range(units)]
    found, test = search(sizes, culprits.issubset)
    assert found == culprits
    assert len(test.seen) <= 14


@settings(max_examples=200)
@given(st.integers(1, 200), st.floats(0.1, 0.9), st.randoms(use_true_random=False))
def test_errors_that_add_up_as_predicted(units, share, draw):
    """The largest are kept, in a few runs, and as many as it takes."""
    sizes = [0.01 + draw.random() ** 4 for _ in range(units)]
    total = math.hypot(*sizes)

    def passes(kept):
        return math.hypot(*(x for i, x in enumerate(sizes) if i not in kept)) <= share * total

    found, test = search(sizes, passes, share)
    smallest = min(found, key=lambda i: sizes[i])
    assert len(found) == 1 or not passes(found - {smallest})
    assert len(test.seen) <= 8


@pytest.mark.parametrize(("units", "runs"), [(1, 10), (100, 23), (2000, 31)])
def test_the_bound(units, runs):
    assert run_bound(units) == runs


@settings(max_examples=200)
@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_alternatives_of_culprits(units, draw):
    """Monotone, with several smallest sets: nothing can be removed from the result."""
    groups = [{draw.randrange(units) for _ in range(3)} for _ in range(3)]
    passes = lambda kept: all(kept & group for group in groups)
    found, _ = search([math.inf] * units, passes, bound=1000)
    assert not any(passes(found - {unit}) for unit in found)


@settings(max_examples=300)
@given(st.integers(1, 80), st.integers(0, 2**32))
def test_a_test_that_is_not_monotone_ends_with_what_has_passed(units, seed):
    everything = frozenset(range(units))
    sizes = [random.Random(seed).random() for _ in range(units)]

    def passes(kept):
        if kept in (frozenset(), everything):
            return bool(kept)
        return random.Random(f"{seed} {sorted(kept)}").random() < 0.4

    found, test = search(sizes, passes)
    again, repeated = search(sizes, passes)
    assert (found, list(test.seen.items())) == (again, list(repeated.seen.items()))


def test_what_is_needless_in_the_end_is_left_out():
    """2 is found first, since 0 harms 1; without 0, the 1 that is found then does alone."""
    passing = [{1}, {1, 2}, {0, 1, 2}]
    found, _ = search([math.inf] * 3, lambda kept: kept in passing)
    assert found == {1}
    found, _ = search([math.inf] * 3, lambda kept: kept in passing, bound=6)
    assert found == {1, 2}
