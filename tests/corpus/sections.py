"""What is recorded of a program: sections of text by title.

``forward LEVEL DTYPE``   the rewritten program
``gradient LEVEL DTYPE``  value and gradient of the sum of its float results
``plan LEVEL DTYPE``      the rows of `explain`: primitive, operands -> results, reason, cause
``computed DTYPE``        the rewritten program at level o1 with ``output_dtype="computed"``
``of gradient``           the rewritten gradient, where autocast sees the backward pass
``plan of gradient``      and its rows

Where something raises, the section is the type and the first line of the error.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jmp_autocast import autocast, explain

from .jaxpr_text import first_line_of, jaxpr_text, without_identity
from .program import Arguments, Program, Setting, unchanged

OUTSIDE = Setting("o1", "bfloat16")
"""How the gradient that autocast sees itself is cast."""


def sections(
    program: Program, settings: tuple[Setting, ...], plans: bool = False
) -> dict[str, str]:
    """Returns the text of each section of a program.

    Args:
        program: The program.
        settings: The levels and compute dtypes.
        plans: Only what says in which dtypes it computes: the sections ``plan ...``.
    """
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings(), program.context():
        warnings.simplefilter("ignore")
        return dict(_sections(program, settings, plans))


def _sections(
    program: Program, settings: tuple[Setting, ...], plans: bool
) -> Iterator[tuple[str, str]]:
    try:
        fn, args = program.build()
    except Exception as error:  # a program may be refused in any way: that is recorded, too
        yield "build", f"raises {first_line_of(error)}"
        return
    arguments = Arguments(args, program.derive)

    def cast(setting: Setting, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            options_of_all = {"policy": program.policy(setting), **program.options, **options}
            return program.around(program.cast(fn, **options_of_all))(*args)

        return run

    for setting in settings:
        if program.around is unchanged:  # explain does not see what is around
            explained = autocast(fn, policy=program.policy(setting), **program.options)
            yield from _explained(str(setting), explained, args)
        if plans:
            continue
        low = cast(setting)
        yield f"forward {setting}", _traced(arguments.flat(low), arguments)
        if arguments.derived:
            gradient = arguments.derivative(low, program.forward_mode)
            yield f"gradient {setting}", _traced(gradient, arguments)
        if setting.level == "o1":
            computed = arguments.flat(cast(setting, output_dtype="computed"))
            yield f"computed {setting.dtype}", _traced(computed, arguments)
    if arguments.derived and OUTSIDE in settings:
        policy = program.policy(OUTSIDE)
        gradient = arguments.derivative(program.around(fn), program.forward_mode, squared=True)
        outside = autocast(gradient, policy=policy)
        if not plans:
            yield "of gradient", _traced(outside, arguments)
        yield from _explained("of gradient", outside, arguments.arrays())


def _traced(fn: Callable[..., Any], arguments: Arguments) -> str:
    # A function of its own: what JAX has traced of another is not found in its cache.
    fresh = functools.partial(lambda *arrays: fn(*arrays))
    return _or_error(lambda: jaxpr_text(jax.make_jaxpr(fresh)(*arguments.arrays())))


def _explained(title: str, wrapper: Any, args: Any) -> Iterator[tuple[str, str]]:
    explained = lambda: "\n".join(map(_plan_line, explain(wrapper, *args).rows))
    yield f"plan {title}", _or_error(explained)


def _or_error(text: Callable[[], str]) -> str:
    try:
        return text()
    except Exception as error:  # likewise
        return f"raises {first_line_of(error)}"


def _plan_line(row: Any) -> str:
    dtypes = f"{' '.join(row.operands)} -> {' '.join(row.results)}"
    # The reader with the need stands at a line of a file, which is another one elsewhere.
    cause = re.sub(r"(read by .*): [\w-]+, .+", r"\1", row.cause)
    line = f"{'  ' * row.depth}{row.primitive} {dtypes} | {row.reason} | {cause}"
    return without_identity(line)
