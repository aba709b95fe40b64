"""Looking at precision: what a plan says of a program, and what its values are when it runs."""

from .compare import compare
from .comparison import ArrayError, Comparison, ComparisonRow
from .explain import explain
from .numerics import check_numerics
from .numerics_report import NumericsReport, NumericsRow
from .report import Change, Report, Totals
from .rows import Row
from .shares import Share
from .stats import OpCount, op_stats

__all__ = [
    "ArrayError",
    "Change",
    "Comparison",
    "ComparisonRow",
    "NumericsReport",
    "NumericsRow",
    "OpCount",
    "Report",
    "Row",
    "Share",
    "Totals",
    "check_numerics",
    "compare",
    "explain",
    "op_stats",
]
