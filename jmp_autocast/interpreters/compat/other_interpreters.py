"""Rules of our primitives for `jax.experimental.jet` and `jax.experimental.sparse`.

Both have a table of rules by primitive. Ours run the JAX operations that `finalise` emits for a
primitive.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .private_names import private
from .registration import stand_ins


def register_with_imported() -> None:
    """Adds the rules to those of the two interpreters that the program has imported.

    A program that uses one has imported it before it traces. Neither is imported here: `sparse`
    takes 0.3 s.
    """
    if "jax.experimental.jet" in sys.modules:
        _add(private("jax.experimental.jet.jet_rules"), _series)
    if "jax.experimental.sparse.transform" in sys.modules:
        _add(private("jax.experimental.sparse.transform.sparse_rules_bcoo"), _sparse)
        _add(private("jax.experimental.sparse.transform.sparse_rules_bcsr"), _sparse)


def _add(rules: dict[Any, Any] | None, rule: Callable[..., Any]) -> None:
    if rules is None:
        return
    for primitive in stand_ins().keys() - rules.keys():
        rules[primitive] = functools.partial(rule, primitive)


def _plain(primitive: Any, params: dict[str, Any]) -> Callable[..., Any]:
    functions = stand_ins()[primitive]
    function = functions.get(jax.default_backend(), functions["default"])
    return functools.partial(function, **params)


def _series(
    primitive: Any, primals: Sequence[Any], series: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    # The terms of a rule are not scaled by factorials.
    jet = private("jax.experimental.jet.jet")
    return jet(_plain(primitive, params), primals, series, factorial_scaled=False)


def _sparse(primitive: Any, environment: Any, *operands: Any, **params: Any) -> Any:
    sparsify_raw = private("jax.experimental.sparse.transform.sparsify_raw")
    results, _ = sparsify_raw(_plain(primitive, params))(environment, *operands)
    return results
