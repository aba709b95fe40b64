"""The search of `tune`, on sets of numbers."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from jmp_autocast.inspect.tuning.search import find_culprits, run_bound


class Test:
    """A test that counts what it is asked, each set once, as `tune` does."""

    __test__ = False

    def __init__(self, passes):
        self._passes = passes
        self.seen = {}

    def __call__(self, kept):
        if kept not in self.seen:
            self.seen[kept] = self._passes(kept)
        return self.seen[kept]

    def may_run(self, units):
        return lambda culprits: len(self.seen) < run_bound(culprits, units)


def search(units, passes, order=None):
    """What is found, after a run with nothing and one with everything kept, as in `tune`."""
    test = Test(passes)
    everything = frozenset(range(units))
    assert not test(frozenset())
    assert test(everything)
    order = list(range(units)) if order is None else order
    return find_culprits(order, test, test.may_run(units)), test


@st.composite
def planted(draw):
    units = draw(st.integers(1, 2000))
    count = draw(st.integers(1, min(5, units)))
    culprits = draw(st.sets(st.integers(0, units - 1), min_size=count, max_size=count))
    order = list(range(units))
    random.Random(draw(st.integers(0, 9))).shuffle(order)
    return units, culprits, order


@settings(max_examples=500)
@given(planted())
def test_planted_culprits_are_found_within_the_bound(problem):
    units, culprits, order = problem
    found, test = search(units, culprits.issubset, order)
    assert set(found) == culprits
    assert len(found) == len(culprits)
    assert len(test.seen) <= run_bound(len(culprits), units)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20, 100])
@pytest.mark.parametrize("units", [100, 127, 128, 129, 191, 192, 193, 1000, 2000])
@pytest.mark.parametrize("where", ["first", "last", "spread"])
def test_the_bound_holds_where_culprits_stand_in_the_worst_places(units, count, where):
    culprits = {
        "first": set(range(count)),
        "last": set(range(units - count, units)),
        "spread": {i * units // count for i in range(count)},
    }[where]
    found, test = search(units, culprits.issubset)
    assert set(found) == culprits
    assert len(test.seen) <= run_bound(count, units)


@pytest.mark.parametrize(("culprits", "units", "runs"), [(1, 1, 10), (1, 2000, 31), (3, 2000, 75)])
def test_the_bound(culprits, units, runs):
    assert run_bound(culprits, units) == runs


def test_a_good_order_takes_few_runs():
    _, test = search(2000, {1990, 1995}.issubset, [1990, 1995, *range(1990), *range(1996, 2000)])
    assert len(test.seen) <= 7


@settings(max_examples=200)
@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_alternatives_of_culprits(units, draw):
    """Monotone, with several smallest sets: what is found is one that nothing can leave."""
    groups = [{draw.randrange(units) for _ in range(3)} for _ in range(3)]
    passes = lambda kept: all(kept & group for group in groups)
    found, _ = search(units, passes)
    assert passes(set(found))
    assert not any(passes(set(found) - {unit}) for unit in found)


@settings(max_examples=300)
@given(st.integers(1, 80), st.integers(0, 2**32))
def test_a_test_that_is_not_monotone_ends_with_what_has_passed(units, seed):
    everything = frozenset(range(units))

    def passes(kept):
        if kept in (frozenset(), everything):
            return bool(kept)
        return random.Random(f"{seed} {sorted(kept)}").random() < 0.4

    found, test = search(units, passes)
    assert test.seen[frozenset(found)]
    again, repeated = search(units, passes)
    assert (found, list(test.seen.items())) == (again, list(repeated.seen.items()))


def test_what_is_needless_in_the_end_is_left_out():
    """2 is found first, since 0 harms 1; without 0, the 1 that is found then does alone."""
    passing = [{1}, {1, 2}, {0, 1, 2}]
    found, _ = search(3, lambda kept: kept in passing)
    assert found == (1,)
    test = Test(lambda kept: kept in passing)
    assert find_culprits(range(3), test, lambda culprits: False) == (2, 1)
