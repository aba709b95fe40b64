"""Policies, rules and tables: which operation runs in which precision. Imports no interpreter."""

from .cast_policy import FULL_POLICIES, CastPolicy, Decision, Rule, apply_rule
from .dtypes import COMPUTE_DTYPES, FLOAT32, FLOAT_DTYPES, listed
from .equation_view import EquationView
from .float8 import E4M3, Float8, as_recipe, may_use_float8
from .parse import PolicyLike, as_policy
from .policy import BF16, FP8, FP16, Policy
from .registry import register_rule
from .tables import (
    CALLS,
    CONTRACTIONS,
    DATA_MOVEMENT,
    DEFAULT_RULES,
    FUNCTIONS_RETURNING_FLOAT32,
    FUNCTIONS_RETURNING_OPERAND_DTYPE,
    MOST_THAT_CANNOT_PAY,
    RETURNS_FLOAT32,
    RETURNS_OPERAND_DTYPE,
    STRUCTURAL,
)

__all__ = [
    "BF16",
    "CALLS",
    "COMPUTE_DTYPES",
    "CONTRACTIONS",
    "DATA_MOVEMENT",
    "DEFAULT_RULES",
    "E4M3",
    "FLOAT32",
    "FLOAT_DTYPES",
    "FP8",
    "FP16",
    "FULL_POLICIES",
    "FUNCTIONS_RETURNING_FLOAT32",
    "FUNCTIONS_RETURNING_OPERAND_DTYPE",
    "MOST_THAT_CANNOT_PAY",
    "RETURNS_FLOAT32",
    "RETURNS_OPERAND_DTYPE",
    "STRUCTURAL",
    "CastPolicy",
    "Decision",
    "EquationView",
    "Float8",
    "Policy",
    "PolicyLike",
    "Rule",
    "apply_rule",
    "as_policy",
    "as_recipe",
    "listed",
    "may_use_float8",
    "register_rule",
]
