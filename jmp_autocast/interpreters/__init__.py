"""trace -> plan -> rewrite: the interpreters. `plan` decides dtypes, `rewrite` emits them."""

from . import plan_casts, rewrite_custom, rewrite_structural
from .plan import Code, EquationPlan, Leaf, Plan, Reason, ValueState, Wanted
from .planner import Planner
from .rewrite import Rewriter

__all__ = [
    "Code",
    "EquationPlan",
    "Leaf",
    "Plan",
    "Planner",
    "Reason",
    "Rewriter",
    "ValueState",
    "Wanted",
    "plan_casts",
    "rewrite_custom",
    "rewrite_structural",
]
