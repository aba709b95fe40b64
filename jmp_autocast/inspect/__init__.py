"""Looking at precision: what a plan says of a program, and what its values are when it runs."""

from ..devices import Device
from ..interpreters.keep.account import CutValue
from .auditing.audit import AuditReport, Finding, audit
from .compiled.explain_compiled import explain_compiled
from .compiled.report import CompiledKernel, CompiledProduct, CompiledReport
from .effects.effects_report import Effect, Effects, ScopeEffect
from .effects.explain_effects import explain_effects
from .measure.check_numerics import check_numerics
from .measure.compare import compare
from .measure.comparison import Comparison, ComparisonRow, GradientError, ScopeError
from .measure.digits_report import Digits, DigitsRow, OutputDigits, ScopeDigits
from .measure.error_probe import ArrayError
from .measure.named_values import NamedError, ProgramComparison
from .measure.numerics_report import NumericsReport, NumericsRow
from .measure.significant_digits import significant_digits
from .measure.stored_values import StoredComparison
from .report.explain import explain
from .report.jaxprs import OpCount, OpCounts, op_stats
from .report.kept import CutJaxpr, Island, KeptArray, KeptReport, explain_kept
from .report.report import Change, Difference, Report
from .report.roofline import DeviceTime, Roofline, ScopeTime
from .report.rows import Row
from .report.totals import Share, Totals
from .report.wire import Wire
from .tuning.tune import tune
from .tuning.tune_report import CurvePoint, KeptOperation, TuneReport

__all__ = [
    "ArrayError",
    "AuditReport",
    "Change",
    "Comparison",
    "ComparisonRow",
    "CompiledKernel",
    "CompiledProduct",
    "CompiledReport",
    "CurvePoint",
    "CutJaxpr",
    "CutValue",
    "Device",
    "DeviceTime",
    "Difference",
    "Digits",
    "DigitsRow",
    "Effect",
    "Effects",
    "Finding",
    "GradientError",
    "Island",
    "KeptArray",
    "KeptOperation",
    "KeptReport",
    "NamedError",
    "NumericsReport",
    "NumericsRow",
    "OpCount",
    "OpCounts",
    "OutputDigits",
    "ProgramComparison",
    "Report",
    "Roofline",
    "Row",
    "ScopeDigits",
    "ScopeEffect",
    "ScopeError",
    "ScopeTime",
    "Share",
    "StoredComparison",
    "Totals",
    "TuneReport",
    "Wire",
    "audit",
    "check_numerics",
    "compare",
    "explain",
    "explain_compiled",
    "explain_effects",
    "explain_kept",
    "op_stats",
    "significant_digits",
    "tune",
]
