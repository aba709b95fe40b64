"""Every primitive has its traits considered, and every structural one is known everywhere."""

import pytest

from jmp_autocast.interpreters.plan.structural import PLANNING_RULES, planning_rule
from jmp_autocast.interpreters.primitives import traits
from jmp_autocast.interpreters.primitives.structure import STRUCTURES
from jmp_autocast.interpreters.primitives.traits import FOLDS, TRAITS, having
from jmp_autocast.interpreters.rewrite.rewriter import REWRITING_RULES
from jmp_autocast.policies import CONTRACTIONS, DATA_MOVEMENT, DEFAULT_RULES, STRUCTURAL, CastPolicy

KEPT = {name for name, rule in DEFAULT_RULES.items() if rule is CastPolicy.KEEP}


def test_traits_are_considered_for_every_primitive_that_may_be_cast():
    assert set(DEFAULT_RULES) - KEPT <= set(TRAITS), "add a row to primitives/traits.py"


def test_no_row_is_for_a_primitive_that_nobody_casts():
    assert set(TRAITS) <= (set(DEFAULT_RULES) - KEPT) | STRUCTURAL


def test_policies_and_traits_agree():
    assert having("moves") == DATA_MOVEMENT
    assert having("contracts") == CONTRACTIONS
    assert set(FOLDS) <= set(TRAITS)
    assert all(
        DEFAULT_RULES[name] is CastPolicy.PROMOTE
        for name in having("feeds") - {"div", "integer_pow"}
    )


@pytest.mark.parametrize("name", sorted(set(DEFAULT_RULES) - KEPT))
def test_what_follows_from_a_trait(name):
    has = TRAITS[name]
    assert "rounds" in has or not has & {"moves", "clears"}, "clears and moves say rounds"
    assert "feeds" in has or "sums" not in has
    assert "affine" in has or "shifts" not in has, "what adds integers makes integers"


@pytest.mark.parametrize(
    ("rows", "message"),
    [({"sin": "bended"}, "no such trait: bended"), ({"sin": "", "cos sin": ""}, "two rows")],
)
def test_a_wrong_row_is_an_error(rows, message):
    with pytest.raises(AssertionError, match=message):
        traits._read(rows)
    with pytest.raises(AssertionError, match="no such trait: bend"):
        having("bend")


def test_every_structural_primitive_is_planned_and_rewritten():
    assert set(STRUCTURES) | set(PLANNING_RULES) == STRUCTURAL
    assert all(planning_rule(name) is not None for name in STRUCTURAL)
    assert set(REWRITING_RULES) == set(STRUCTURES)
