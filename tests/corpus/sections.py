"""What is recorded of a program: sections of text by title.

``forward LEVEL DTYPE``   the rewritten program
``gradient LEVEL DTYPE``  value and gradient of the sum of its float results
``plan LEVEL DTYPE``      the rows of `explain`: primitive, operands -> results, reason, cause
``links LEVEL DTYPE``     the other fields of the rows, and the totals
``computed DTYPE``        the rewritten program at level o1 with ``output_dtype="computed"``
``of gradient``           the rewritten gradient, where autocast sees the backward pass
``plan of gradient``      and its rows

Where something raises, the section is the type and the first line of the error.
"""

from __future__ import annotations

import dataclasses
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

# Each field by its names, the newest first: a renamed one keeps its place.
ROW_FIELDS = (
    ("scope",),
    ("inner",),
    ("times",),
    ("operand_shapes",),
    ("declared_operands",),
    ("declared_results",),
    ("rule",),
    ("operand_rows",),
    ("operand_inputs",),
    ("operand_sources", "operand_leaves"),
    ("cause_operands",),
    ("cause_rows",),
    ("flops",),
    ("nbytes", "size"),
    ("declared_nbytes", "declared_size"),
)
TOTAL_FIELDS = (
    ("equations",),
    ("flops",),
    ("contraction_flops",),
    ("low_contraction_flops",),
    ("parameters",),
    ("cast_parameters",),
    ("residual_nbytes", "residual_size"),
    ("float32_residual_nbytes", "float32_residual_size"),
    ("unknown",),
    ("unmatched_scopes",),
    ("loops_of_unknown_length",),
)
CAST_FIELDS = (("down",), ("down_nbytes", "down_size"), ("up",), ("up_nbytes", "up_size"))


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
            yield from _explained(str(setting), explained, args, plans)
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
        yield from _explained("of gradient", outside, arguments.arrays(), plans)


def _traced(fn: Callable[..., Any], arguments: Arguments) -> str:
    # A function of its own: what JAX has traced of another is not found in its cache.
    fresh = functools.partial(lambda *arrays: fn(*arrays))
    return _or_error(lambda: jaxpr_text(jax.make_jaxpr(fresh)(*arguments.arrays())))


def _explained(title: str, wrapper: Any, args: Any, plans: bool) -> Iterator[tuple[str, str]]:
    found: list[str] = []

    def explained() -> str:
        report = explain(wrapper, *args)
        if not plans:
            found.append(_links_text(report))
        return "\n".join(map(_plan_line, report.rows))

    yield f"plan {title}", _or_error(explained)
    yield from ((f"links {title}", text) for text in found)


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


def _links_text(report: Any) -> str:
    lines = [f"{row.index} {_fields(row, ROW_FIELDS)}" for row in report.rows]
    totals = report.totals
    lines.append(f"totals {_fields(totals, TOTAL_FIELDS)} {_fields(totals.casts, CAST_FIELDS)}")
    return without_identity("\n".join(lines))


def _fields(data: Any, fields: tuple[tuple[str, ...], ...]) -> str:
    known = {field.name for field in dataclasses.fields(data)}
    found = [next((name for name in names if name in known), None) for names in fields]
    values = [
        f"{names[0]}={getattr(data, name)!r}"
        for names, name in zip(fields, found, strict=True)
        if name is not None
    ]
    return " ".join(values)
