"""JAX's private names and other names that a JAX release may remove.

The package works without each of them, and looks it up at each use. The names that the package
cannot work without come from JAX's modules for extensions: ``jax.core``, ``jax.extend`` and, to
register primitives, ``jax.interpreters``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PRIVATE: Mapping[str, str] = MappingProxyType(
    {
        "jax._src.config.trace_context": "nothing that depends on settings is found in a cache",
        "jax._src.interpreters.ad.backward_pass": (
            "gradients of products with an unreduced result are refused"
        ),
        "jax._src.xla_bridge.backends_are_initialized": (
            "`repr` of a wrapper names no dtype where the device chooses it"
        ),
        "jax._src.traceback_util.register_exclusion": (
            "tracebacks of a user's own error show our frames, too"
        ),
        "jax.interpreters.partial_eval.DynamicJaxprTracer": (
            "equations are bound as where something is differentiated, and what rules close over "
            "is not found"
        ),
        "jax.interpreters.partial_eval.dce_jaxpr": "`explain` counts what nothing reads as kept",
        "jax.interpreters.partial_eval.partial_eval_jaxpr_custom_rules": (
            "checkpoint policies compute our products again"
        ),
        "jax.extend.linear_util.WrappedFun": "calls of one function with a rule do not share it",
        "jax.experimental.jet.jet": "`jet` of a rewritten program needs `finalise`",
        "jax.experimental.jet.jet_rules": "the same",
        "jax.experimental.sparse.transform.sparse_rules_bcoo": (
            "`sparsify` of a rewritten program needs `finalise`"
        ),
        "jax.experimental.sparse.transform.sparse_rules_bcsr": "the same",
        "jax.experimental.sparse.transform.sparsify_raw": "the same",
        "jax.experimental.layout.Layout": "8-bit weights in a loop are transposed as a stack",
        "jax.experimental.layout.with_layout_constraint": "the same",
    }
)
"""Each name, with the effect of its absence."""


def private(name: str) -> Any:
    """Returns the object that a name of `PRIVATE` refers to; None if JAX no longer has it."""
    return _looked_up(name) if name in PRIVATE else None


@functools.cache
def _looked_up(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None
