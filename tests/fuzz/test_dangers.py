"""A few programs of what was silently wrong, and proof that their oracle sees it."""

import pytest

from jmp_autocast import CastPolicy, register_rule
from jmp_autocast.interpreters.plan import basic_plans, votes

from .dangers import draw, run
from .taken_out import without_link


@pytest.mark.parametrize("block", range(2))
def test_no_result_is_further_off_than_by_simple_rules(block):
    failed = [run(0, 15 * block + i) for i in range(15)]
    failed = [(danger.text, message) for danger, message in failed if message]
    assert not failed, failed


def test_equal_numbers_give_equal_programs():
    assert draw(3, 1).text == draw(3, 1).text
    assert len({draw(3, i).text for i in range(20)}) > 15


def without_summands(patch):
    every = votes._votes
    others = lambda ctx, *args: ctx.name not in votes._SHIFTS and every(ctx, *args)
    patch.setattr(votes, "_votes", others)


def without_float32_windows(patch):
    without_link("leads_to_no_product")(patch)
    register_rule("reduce_window_sum", CastPolicy.PROMOTE)


# family: what is taken from the planner
LOST = {
    "summands": without_summands,
    "windows": without_float32_windows,
    "rows": lambda patch: patch.setattr(basic_plans, "is_replicated", lambda *_: False),
    "updates": without_summands,
}


@pytest.mark.parametrize("family", LOST)
def test_the_oracle_sees_a_lost_promise(family, monkeypatch):
    LOST[family](monkeypatch)
    # Of a campaign that finds each early: what looks wrong is checked with many other digits.
    assert any(run(2, i, family)[1] for i in range(400))
