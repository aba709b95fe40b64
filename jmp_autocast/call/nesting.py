"""Programs whose calls are nested more deeply than Python's stack."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..interpreters.compat import AnyJaxpr, body_of
from ..interpreters.primitives.structure import bodies, innermost_first
from .arguments import name_of

# Ten frames of Python a level, of 1,000: fewer levels are not what was too deep.
_DEEP = 60


@contextlib.contextmanager
def naming_the_nesting(traced: AnyJaxpr, fn: Any) -> Iterator[None]:
    """Has the error about Python's stack say how deeply a program is nested.

    Args:
        traced: The jaxpr of the program.
        fn: The user's function.

    Raises:
        RecursionError: The program is nested too deeply for Python's limit.
    """
    try:
        yield
    except RecursionError:
        nested = innermost_first(
            body_of(traced),
            lambda jaxpr: [body_of(body.jaxpr) for eqn in jaxpr.eqns for body in bodies(eqn)],
        )
        levels = nested[-1][1] - 1
        if levels < _DEEP:
            raise
        raise RecursionError(
            f"{name_of(fn)} nests {levels} calls, loops or branches in one another, and autocast "
            f"takes up to ten frames of Python for each, of the {sys.getrecursionlimit()} that "
            "Python allows. Write the recursion as a lax.scan, or raise the limit: "
            f"sys.setrecursionlimit({20 * levels})."
        ) from None
