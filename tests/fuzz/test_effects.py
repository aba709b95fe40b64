"""A few programs with effects: `python -m tests.fuzz.effects` runs more of them."""

import pytest

from .effects import PARTS, check

# Without the order that `keep.graph` keeps, number 5 loses a write and number 6 swaps callbacks:
# two rows of `mutations.toml`.
SEEDS = range(8)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("seed", SEEDS)
def test_effects_are_as_without_autocast(seed):
    part, wrong, program = check(seed, ("keep_less", "residuals='recompute'", "residuals=0.5"))
    assert part in PARTS
    assert not wrong, (wrong, program)
