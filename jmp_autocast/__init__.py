"""Automatic mixed precision for JAX by jaxpr rewriting.

The types that tools such as `explain` and `compare` return are in `jmp_autocast.inspect`.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .autocast import autocast
from .call.kernels import in_compute_dtype
from .call.names import hint_for
from .cast_params import cast_params
from .interpreters.primitives.finalise import finalise
from .keep_less import keep_less
from .loss_scaling import (
    dynamic_loss_scaling,
    scaled_value_and_grad,
    skipped_steps,
    static_loss_scaling,
)
from .policies import (
    BF16,
    FP8,
    FP16,
    CastPolicy,
    Decision,
    EquationView,
    Float8,
    Policy,
    register_rule,
)
from .quantize_params import quantize_params
from .scopes import compute_precision, full_precision

if TYPE_CHECKING:
    from . import inspect as inspect
    from .inspect import (
        check_numerics,
        compare,
        explain,
        explain_compiled,
        tune,
    )

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "CastPolicy",
    "Decision",
    "EquationView",
    "Float8",
    "Policy",
    "autocast",
    "cast_params",
    "check_numerics",
    "compare",
    "compute_precision",
    "dynamic_loss_scaling",
    "explain",
    "explain_compiled",
    "finalise",
    "full_precision",
    "in_compute_dtype",
    "keep_less",
    "quantize_params",
    "register_rule",
    "scaled_value_and_grad",
    "skipped_steps",
    "static_loss_scaling",
    "tune",
]

_PACKAGES = "inspect", "integrations", "loss_scaling", "optimizers", "policies"


def __getattr__(name: str) -> Any:
    # Tools such as `explain` and `compare` are a third of the package, and training needs none of
    # them, so they are imported at their first use. A name of `__all__` that this module does not
    # define is a tool.
    if name == "inspect" or name in __all__:
        tools = importlib.import_module(".inspect", __name__)
        return tools if name == "inspect" else getattr(tools, name)
    if hint := hint_for(name, __name__):
        # Python drops the message of an AttributeError in `from jmp_autocast import name`, so an
        # import raises an ImportError. All else, such as `hasattr`, gets an AttributeError.
        caller = sys._getframe(1).f_globals.get("__name__")
        kind = ImportError if caller == "importlib._bootstrap" else AttributeError
        raise kind(f"{__name__} has no {name!r}. {hint}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, "__version__"})
