"""Which jaxprs are of one kind: the same equations on the same types, traced anew for each call.

JAX traces a function with a derivative rule of the user's own, such as ``jax.nn.relu6``, again at
each call, and so does the rewriter with each such rule. Calls that share a plan share the rewritten
function, and JAX runs its rule once (`tests/derivatives/test_same_rules.py`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from ...policies.callables import has_hash
from ..compat import AnyJaxpr, Literal, body_of, consts_of, scope_names

# The key of a jaxpr costs time for each equation; longer jaxprs are traced once, or jitted.
_MAX_EQNS = 32


def kind_of(jaxpr: AnyJaxpr) -> Hashable:
    """Returns a key of jaxprs that may share a plan, None for a jaxpr that is planned alone.

    Args:
        jaxpr: An open or closed jaxpr.
    """
    body = body_of(jaxpr)
    if len(body.eqns) > _MAX_EQNS or body.constvars or consts_of(jaxpr) or body.effects:
        return None
    numbers = {v: i for i, v in enumerate(body.invars)}
    parts: list[Hashable] = [tuple([v.aval for v in body.invars])]
    for eqn in body.eqns:
        parts.append((eqn.primitive, scope_names(eqn), *_atoms(eqn.invars, numbers)))
        parts.append((*eqn.params, *eqn.params.values(), *[v.aval for v in eqn.outvars]))
        numbers.update((v, len(numbers) + k) for k, v in enumerate(eqn.outvars))
    kind = (*parts, *_atoms(body.outvars, numbers))
    # A parameter may have no hash, and a literal that is an array has none.
    return kind if has_hash(kind) else None


def _atoms(atoms: Any, numbers: dict[Any, int]) -> list[Hashable]:
    return [literal_key(v) if isinstance(v, Literal) else numbers[v] for v in atoms]


def literal_key(literal: Literal) -> Hashable:
    """Returns the value and the type of a literal as a key."""
    # In a dict of Python, 1, 1.0 and True are one key.
    value = literal.val
    known = value.tobytes() if isinstance(value, np.generic | np.ndarray) else repr(value)
    return type(value), known, literal.aval
