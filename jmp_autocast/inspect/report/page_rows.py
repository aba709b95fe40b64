"""Rows as the page of a report shows them."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from ...interpreters.plan.reasons import ReasonCode
from ..export import scaled
from .rows import SHORT, Row
from .totals import dtype_of, is_float


def page_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the rows of a report as the page takes them."""
    return [_page_row(row) for row in rows]


def _page_row(row: Row) -> dict[str, Any]:
    explained = explanations()[ReasonCode(row.reason)]
    operands = map(
        _value, row.operands, row.declared_operands, row.operand_shapes, row.operand_inputs
    )
    no_inputs = ("",) * len(row.results)
    results = map(_value, row.results, row.declared_results, row.result_shapes, no_inputs)
    kinds = {"float16": "low", "bfloat16": "low", "float32": "full"}
    dtype = dtype_of(row)
    return {
        "index": row.index,
        "depth": row.depth,
        "primitive": row.primitive,
        "times": row.times,
        "scope": row.scope,
        "source": row.source,
        "operands": list(zip(operands, row.operand_rows, strict=True)),
        "results": list(results),
        "reason": row.reason,
        "explanation": f"{explained.says} {explained.otherwise}".rstrip(),
        "cause": row.cause,
        "cause_rows": row.cause_rows,
        "flops": scaled(row.flops).rstrip() if row.flops else "",
        "kind": kinds.get(dtype, "other" if is_float(dtype) else "none"),
        "changed": (row.operands, row.results) != (row.declared_operands, row.declared_results),
    }


def _value(dtype: str, declared: str, shape: tuple[int, ...], source: str) -> str:
    """Returns an operand or result in a few words: ``"bf16[8,8] of f32 0/w"``."""
    text = f"{SHORT.get(dtype, dtype)}[{','.join(map(str, shape))}]"
    was = "" if dtype == declared else f" of {SHORT.get(declared, declared)}"
    return f"{text}{was} {source}".rstrip()


class Explanation(NamedTuple):
    """What a code says, in Markdown that uses code spans alone.

    Args:
        says: Why the equation runs in its dtypes.
        otherwise: What to do to have it otherwise, ``""`` where nothing can be done or need be.
    """

    says: str
    otherwise: str = ""


@functools.cache
def explanations() -> Mapping[ReasonCode, Explanation]:
    """Returns what each code says. The texts are no code: they stand beside those of the page."""
    text = (resources.files(__package__ or "") / "reasons.toml").read_text("utf-8")
    return {ReasonCode(code): Explanation(**said) for code, said in tomllib.loads(text).items()}
