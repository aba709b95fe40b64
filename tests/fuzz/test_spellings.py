"""A few programs in several spellings, and proof that a lost row is seen."""

import pytest

from jmp_autocast.interpreters.plan import needs
from jmp_autocast.interpreters.plan.needs import Need

from .spellings import FAMILIES, draw, run


def test_no_spelling_is_much_further_off_than_the_best():
    failed = [run(0, i) for i in range(10)]
    failed = [(spelled.texts, said) for spelled, said in failed if said]
    assert not failed, failed


def test_equal_numbers_give_equal_programs():
    assert draw(3, 1).texts == draw(3, 1).texts
    assert len({draw(3, i).family.name for i in range(20)}) > 10
    assert min(len(family.spellings) for family in FAMILIES.values()) > 2


def no_need(need, monkeypatch):
    asked = {name: [r for r in rows if r.need != need] for name, rows in needs._ASKED.items()}
    monkeypatch.setattr(needs, "_ASKED", asked)


# family: what is taken from the planner
LOST = {
    "chosen": lambda patch: no_need(Need.RANKED, patch),
    "complement": lambda patch: no_need(Need.NEAR_1, patch),
    "covariance": lambda patch: no_need(Need.EXPANDED, patch),
}


@pytest.mark.parametrize("family", LOST)
def test_a_lost_row_makes_a_spelling_worse(family, monkeypatch):
    LOST[family](monkeypatch)
    assert any(run(4, i, family)[1] for i in range(30))
