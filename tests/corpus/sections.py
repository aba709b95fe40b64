"""What is recorded of a program: sections of text by title.

``plan LEVEL DTYPE``    the rows of `explain`: primitive, operands -> results, reason, cause
``plan of gradient``    the same of the gradient, where autocast sees the backward pass

Where something raises, the section is the type and the first line of the error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax

from jmp_autocast import autocast, explain

from .jaxpr_text import first_line_of, without_identity
from .program import Arguments, Program, Setting, unchanged

OUTSIDE = Setting("o1", "bfloat16")
"""How the gradient that autocast sees itself is cast."""


def sections(program: Program, settings: tuple[Setting, ...]) -> dict[str, str]:
    """Returns the text of each section of a program."""
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings(), program.context():
        warnings.simplefilter("ignore")
        return dict(_sections(program, settings))


def _sections(program: Program, settings: tuple[Setting, ...]) -> Iterator[tuple[str, str]]:
    try:
        fn, args = program.build()
    except Exception as error:  # a program may be refused in any way: that is recorded, too
        yield "build", f"raises {first_line_of(error)}"
        return
    for setting in settings:
        if program.around is unchanged:  # explain does not see what is around
            explained = autocast(fn, policy=program.policy(setting), **program.options)
            yield f"plan {setting}", _plan(explained, args)
    arguments = Arguments(args, program.derive)
    if arguments.derived and OUTSIDE in settings:
        gradient = arguments.derivative(program.around(fn), program.forward_mode, squared=True)
        outside = autocast(gradient, policy=program.policy(OUTSIDE))
        yield "plan of gradient", _plan(outside, arguments.arrays())


def _plan(wrapper: Any, args: Any) -> str:
    try:
        return "\n".join(map(_plan_line, explain(wrapper, *args).rows))
    except Exception as error:  # likewise
        return f"raises {first_line_of(error)}"


def _plan_line(row: Any) -> str:
    dtypes = f"{' '.join(row.operands)} -> {' '.join(row.results)}"
    line = f"{'  ' * row.depth}{row.primitive} {dtypes} | {row.reason} | {row.cause}"
    return without_identity(line)
