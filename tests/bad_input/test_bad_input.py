"""Every wrong use says what is wrong and what to do, and leaves nothing half-done.

The rows are beside this file, by room. `test_arguments.py` of `loss_scaling` and
`test_nnx_writes.py` of `integrations` have more of them.
"""

import re

import pytest

import jmp_autocast

from . import (
    first_mistakes_rows,
    inspect_rows,
    integrations_rows,
    loss_scale_rows,
    nnx_rows,
    policy_file_rows,
    policy_rows,
    transform_rows,
    tune_rows,
)
from .row import world

ROOMS = (
    transform_rows,
    policy_rows,
    policy_file_rows,
    loss_scale_rows,
    inspect_rows,
    tune_rows,
    nnx_rows,
    integrations_rows,
    first_mistakes_rows,
)
ROWS = [row for room in ROOMS for row in room.ROWS]

# The library makes these, and users only read them.
RESULTS = {"EquationView"}
# Rows about policies and their members go by the name of what takes them.
GIVEN_TO_OTHERS = {"BF16", "CastPolicy", "FP16", "FP8"}
WITHOUT_ARGUMENTS = {"full_precision"}
# Names of rooms that have rows, too.
IN_ROOMS = {"loss_scale"}


@pytest.fixture(scope="module")
def program():
    return world().program()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_wrong_use(row, program):
    here = world()
    before = here.snapshot()
    with pytest.raises(row.error) as caught:
        row.call(here)
    assert caught.type is row.error
    for part in row.parts:
        assert re.search(part, str(caught.value), re.DOTALL), (part, str(caught.value))
    after = here.snapshot()
    for name, value in before.items():
        assert after[name] == value, f"changed: {name}"
    assert here.program() == program


def test_the_table_covers_the_public_names():
    assert len(set(map(str, ROWS))) == len(ROWS)
    covered = {row.public for room in ROOMS if room is not first_mistakes_rows for row in room.ROWS}
    expected = set(jmp_autocast.__all__) - RESULTS - GIVEN_TO_OTHERS - WITHOUT_ARGUMENTS
    assert covered == {*expected, nnx_rows.NNX, *integrations_rows.PUBLIC, *IN_ROOMS}


@pytest.mark.parametrize(
    "name", ["GradScaler", "mixed_precision", "Comparison", "nothing_of_the_kind"]
)
def test_names_that_are_not_there_can_be_asked_for(name):
    assert not hasattr(jmp_autocast, name)
    assert getattr(jmp_autocast, name, None) is None
