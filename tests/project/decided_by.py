"""How many functions in how many files decide one dtype: ``python -m tests.project.decided_by``.

The dtype of the ``add`` of ``x @ w + b``, as the planner decides it the first time. What a reader
has to have read to say what it will be: each function of the package that is called meanwhile.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import jax.numpy as jnp

import jmp_autocast
from jmp_autocast import BF16, explain
from jmp_autocast.interpreters import Planner

PACKAGE = pathlib.Path(jmp_autocast.__file__).parent
DECISION = Planner._plan_equation
"""Decides the dtypes of one equation."""


def decided_by(fn: Callable[..., Any], args: tuple[Any, ...], primitive: str) -> list[str]:
    """Returns the functions that decide the dtypes of the last equation of a primitive."""
    found: list[dict[CodeType, None]] = []
    depth = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        entered = frame.f_code is DECISION.__code__
        if event == "call" and entered and not depth and _is_of(frame, primitive):
            found.append({})
            depth = 1
        elif entered and depth:
            depth += {"call": 1, "return": -1}.get(event, 0)
        if depth and event == "call":
            found[-1][frame.f_code] = None

    explain(fn, *args, policy=BF16)  # what is imported or cached once is no part of a decision
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        explain(fn, *args, policy=BF16)
    finally:
        sys.setprofile(before)
    return list(_names(found[0]))


def _is_of(frame: FrameType, primitive: str) -> bool:
    """Whether an argument of a function is an equation of a primitive, or has one."""
    values = [getattr(value, "eqn", value) for value in list(frame.f_locals.values())]
    names = (getattr(getattr(value, "primitive", None), "name", "") for value in values)
    return primitive in names


def _names(codes: dict[CodeType, None]) -> Iterator[str]:
    for code in codes:
        path = pathlib.Path(code.co_filename)
        # A comprehension is a function of its own in Python 3.11 alone.
        is_loop = code.co_name in ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>")
        if path.is_relative_to(PACKAGE) and not is_loop:
            yield f"{path.relative_to(PACKAGE)}: {code.co_qualname}"


def bias(params: dict[str, Any], x: Any) -> Any:
    return x @ params["w"] + params["b"]


def of_a_bias() -> tuple[list[str], int]:
    """Returns the functions that decide the ``add`` of ``x @ w + b``, and the number of files."""
    args = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}, jnp.ones((2, 8))
    functions = decided_by(bias, args, "add")
    return functions, len({name.split(":")[0] for name in functions})


if __name__ == "__main__":
    functions, files = of_a_bias()
    print("\n".join(functions))
    print(f"{len(functions)} functions in {files} files")
