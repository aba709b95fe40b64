"""Rules for the package's primitives in `jax.experimental.jet` and `jax.experimental.sparse`.

Both modules have a table of rules by primitive. A rule of the package runs the JAX operations that
`finalise` emits for the primitive.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .private_names import private
from .registration import STAND_INS, plain_function


def register_with_imported() -> None:
    """Adds the package's rules to `jet` and `sparse`, if the program has imported them.

    A program that uses one of these two modules has imported it before the trace. They are not
    imported here, because an import of `sparse` takes 0.3 s.
    """
    if "jax.experimental.jet" in sys.modules:
        _add(private("jax.experimental.jet.jet_rules"), _series)
    if "jax.experimental.sparse.transform" in sys.modules:
        _add(private("jax.experimental.sparse.transform.sparse_rules_bcoo"), _sparse)
        _add(private("jax.experimental.sparse.transform.sparse_rules_bcsr"), _sparse)


def _add(rules: dict[Any, Any] | None, rule: Callable[..., Any]) -> None:
    if rules is not None:
        for primitive in STAND_INS.keys() - rules.keys():
            rules[primitive] = functools.partial(rule, primitive)


def _series(
    primitive: Any, primals: Sequence[Any], series: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    # A rule of `jet` takes and returns Taylor coefficients that are not scaled by factorials.
    jet = private("jax.experimental.jet.jet")
    function = plain_function(primitive, params, jax.default_backend())
    return jet(function, primals, series, factorial_scaled=False)


def _sparse(primitive: Any, environment: Any, *operands: Any, **params: Any) -> Any:
    sparsify_raw = private("jax.experimental.sparse.transform.sparsify_raw")
    function = plain_function(primitive, params, jax.default_backend())
    return sparsify_raw(function)(environment, *operands)[0]
