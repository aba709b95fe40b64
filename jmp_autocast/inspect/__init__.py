"""Looking at precision: what a plan says of a program, and which dtypes a program runs in."""

from .explain import explain
from .report import Change, Report, Totals
from .rows import Row
from .shares import Share
from .stats import OpCount, op_stats

__all__ = ["Change", "OpCount", "Report", "Row", "Share", "Totals", "explain", "op_stats"]
