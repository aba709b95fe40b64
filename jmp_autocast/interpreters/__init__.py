"""The interpreters of a jaxpr: `before`, `plan`, `rewrite` and `after`, in the order of their use.

`before` prepares a jaxpr, `plan` decides dtypes, and `rewrite` emits the program. `after` answers
questions about a finished plan, for the rewriter and for reports.

Reading order: `primitives/traits.py` and `structure.py` (facts about primitives), `plan/data.py`
(the contents of a plan), `plan/planner.py` and `plan/equation.py` (how a plan is made),
`rewrite/rewriter.py` (how a plan is carried out).
"""

from .plan import loops
from .plan.data import EquationPlan, Plan, Reason, ReasonCode, Request, Source, ValueState
from .plan.planner import Planner
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
]
