"""trace -> before -> plan -> rewrite: the interpreters.

`before` prepares a jaxpr, `plan` decides dtypes, `rewrite` emits them.

`after` answers what is asked of a finished plan, by the rewriter and by reports.

Reading order: `primitives/traits.py` and `structure.py` (what is known of primitives),
`plan/data.py` (what a plan says), `plan/planner.py` and `plan/equation.py` (how it is made),
`rewrite/rewriter.py` (how it is carried out).
"""

from .plan import loops, user_casts
from .plan.data import EquationPlan, Plan, Request, Source, ValueState
from .plan.planner import Planner
from .plan.reasons import Reason, ReasonCode
from .rewrite import derivative_rules, structural
from .rewrite.rewriter import Rewriter

__all__ = [
    "EquationPlan",
    "Plan",
    "Planner",
    "Reason",
    "ReasonCode",
    "Request",
    "Rewriter",
    "Source",
    "ValueState",
    "derivative_rules",
    "loops",
    "structural",
    "user_casts",
]
