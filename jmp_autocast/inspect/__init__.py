"""Tools for users: the dtypes of a plan, and the values and kernels of a program."""

from .compiled.explain_compiled import explain_compiled
from .compiled.report import CompiledKernel, CompiledProduct, CompiledReport
from .measure.check_numerics import check_numerics
from .measure.compare import compare
from .measure.comparison import Comparison, ComparisonRow, GradientError
from .measure.error_probe import ArrayError
from .measure.named_values import NamedError, ProgramComparison
from .measure.numerics_report import NumericsReport, NumericsRow
from .report.at_risk import AtRisk
from .report.explain import explain
from .report.kept import KeptRow
from .report.report import Report
from .report.rows import Row
from .report.totals import Share, Totals
from .tuning.tune import tune
from .tuning.tune_report import KeptOperation, TuneReport

__all__ = [
    "ArrayError",
    "AtRisk",
    "Comparison",
    "ComparisonRow",
    "CompiledKernel",
    "CompiledProduct",
    "CompiledReport",
    "GradientError",
    "KeptOperation",
    "KeptRow",
    "NamedError",
    "NumericsReport",
    "NumericsRow",
    "ProgramComparison",
    "Report",
    "Row",
    "Share",
    "Totals",
    "TuneReport",
    "check_numerics",
    "compare",
    "explain",
    "explain_compiled",
    "tune",
]
