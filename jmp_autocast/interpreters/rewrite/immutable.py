"""Inputs that a rewritten jaxpr cannot take: values that a trace may change, other than refs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..compat import AnyJaxpr, function_name, may_change


def check_immutable(closed: AnyJaxpr, avals: Sequence[Any]) -> None:
    """Raises for an input that JAX lets a trace change, such as a hijax variable of Flax.

    Its type alone does not describe its contents, so that no jaxpr can be traced for the type.

    Args:
        closed: The jaxpr inside an equation.
        avals: The types of its inputs, as it would be traced for them.
    """
    for aval in avals:
        if may_change(aval):
            raise TypeError(
                f"autocast cannot rewrite {function_name(closed)}, which a jit, a loop or a branch "
                "calls with a value that a trace may change, such as a hijax variable of Flax. "
                "Pass what the variable holds, variable[...]."
            )
