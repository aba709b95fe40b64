"""Looking at precision: what a plan says of a program, and what its values are when it runs."""

from .program.explain import explain
from .program.report import Change, Report, Totals
from .program.rows import Row
from .program.shares import Share
from .program.stats import OpCount, op_stats
from .running.compare import compare
from .running.comparison import ArrayError, Comparison, ComparisonRow
from .running.numerics import check_numerics
from .running.numerics_report import NumericsReport, NumericsRow
from .tuning.tune import tune
from .tuning.tune_report import Pin, TuneReport

__all__ = [
    "ArrayError",
    "Change",
    "Comparison",
    "ComparisonRow",
    "NumericsReport",
    "NumericsRow",
    "OpCount",
    "Pin",
    "Report",
    "Row",
    "Share",
    "Totals",
    "TuneReport",
    "check_numerics",
    "compare",
    "explain",
    "op_stats",
    "tune",
]
