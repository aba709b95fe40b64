"""A few programs in several spellings, and proof that a lost row is seen."""

import numpy as np
import pytest

from jmp_autocast.interpreters.plan.needs import Need

from .spellings import FAMILIES, Errors, draw, run
from .taken_out import without_need, without_the_rule


def test_no_spelling_is_much_further_off_than_the_best():
    failed = [run(0, i) for i in range(10)]
    failed = [(spelled.texts, said) for spelled, said in failed if said]
    assert not failed, failed


def test_equal_numbers_give_equal_programs():
    assert draw(3, 1).texts == draw(3, 1).texts
    assert len({draw(3, i).family.name for i in range(20)}) > 10
    assert min(len(family.spellings) for family in FAMILIES.values()) > 2


# family: the need whose row is taken from the planner
LOST = {"chosen": Need.SHARP, "complement": Need.SHARP, "covariance": Need.EXPANDED}


@pytest.mark.parametrize("family", LOST)
def test_a_lost_row_makes_a_spelling_worse(family, monkeypatch):
    without_the_rule(monkeypatch)
    without_need(LOST[family])(monkeypatch)
    assert any(run(4, i, family)[1] for i in range(30))


def test_what_float32_loses_is_no_matter_of_the_spelling(monkeypatch):
    # log(1 - sigmoid(p)) is infinite in float32 from p = 17 on.
    assert not run(5, 64, "softplus")[1]
    monkeypatch.setattr(Errors, "in_float32", lambda self, args: np.zeros((3, 9)))
    assert run(5, 64, "softplus")[1]
