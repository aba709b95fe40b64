"""What the products of a program do, whatever the device: FLOPs, bytes and runs of each."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence, Set

import numpy as np

from ...policies import CONTRACTIONS, DATA_MOVEMENT, E4M3, FLOAT32, Float8
from .rows import Row
from .totals import is_low, item_size

LOW, EIGHT, FULL = "low", "float8", "float32"
"""The ways to run a program: its lowered products in 16 bits, those of weights in 8, or none."""

PLANNED = "planned"
"""As it is planned."""

_HANDS_ON = DATA_MOVEMENT | {"convert_element_type", "source_view"}


@dataclasses.dataclass(frozen=True)
class Products:
    """The matmuls and convolutions of a program, an entry each.

    Args:
        rows: Their rows.
        scopes: Their scopes; those that differ by a number alone, as those of layers, are one.
        flops: Over all runs.
        times: How often each runs.
        nbytes: Of operands and results over all runs, for each way to run them.
        dtypes: In what each is multiplied, for each way: a name of a dtype, or `LOW`.
        wide: The bytes by which float32 arguments exceed what is read of them in 16 bits: whoever
            reads an argument first reads it as it is stored.
    """

    rows: tuple[Row, ...]
    scopes: tuple[str, ...]
    flops: np.ndarray
    times: np.ndarray
    nbytes: Mapping[str, np.ndarray]
    dtypes: Mapping[str, tuple[str, ...]]
    wide: np.ndarray


def products_of(rows: Sequence[Row], elements: Mapping[str, int]) -> Products:
    """Returns the products of a program.

    Args:
        rows: The rows of its report.
        elements: The number of elements of each array argument, by its path.
    """
    found = [row for row in rows if row.primitive in CONTRACTIONS]
    extra = _wide_reads(found, rows, elements)
    full, planned = (np.array([nbytes_in(row, way) for row in found]) for way in (FULL, PLANNED))
    low, eight = (np.array([nbytes_in(row, way) for row in found]) for way in (LOW, EIGHT))
    return Products(
        tuple(found),
        tuple(alike(row.scope) for row in found),
        np.array([row.flops for row in found], float),
        np.array([row.times for row in found], float),
        {FULL: full, LOW: low + extra, EIGHT: eight + extra, PLANNED: planned + extra},
        {
            FULL: (FULL,) * len(found),
            LOW: tuple(LOW if _is_lowered(row) else FULL for row in found),
            EIGHT: tuple(map(_in_eight, found)),
            PLANNED: tuple(map(_in_plan, found)),
        },
        extra,
    )


def alike(scope: str) -> str:
    """Returns a scope without its numbers.

    Example:
        >>> alike("layers_12/attention")
        'layers_*/attention'
    """
    return re.sub(r"\d+", "*", scope)


def _is_lowered(row: Row) -> bool:
    return all(is_low(name) for name in row.operands[:2])


def _in_plan(row: Row) -> str:
    """The widest of the two factors: a product of bfloat16 and float32 is one of float32."""
    return max(row.operands[:2], key=item_size)


def _in_eight(row: Row) -> str:
    if not _is_lowered(row):
        return FULL
    return EIGHT if row.operands[0] == E4M3.name or _fits_eight(row) else LOW


def _fits_eight(row: Row) -> bool:
    """Whether `Float8()` would take a product: one of matrices, without a batch, that is large."""
    if row.primitive != "dot_general" or not row.flops:
        return False
    left, right = (math.prod(shape) for shape in row.operand_shapes[:2])
    results = math.prod(row.result_shapes[0])
    inner = row.flops // (2 * results * row.times)
    # M x K times K x N: the operands have M K and K N elements, and each batch has as many.
    if left * right != results * inner**2:
        return False
    sizes, recipe = (left // inner, inner, right // inner), Float8()
    # As `Float8` asks of a weight; of the three sizes the smallest may be the rows of activations.
    return all(size % recipe.multiple == 0 for size in sizes) and sorted(sizes)[1] >= recipe.minimum


def nbytes_in(row: Row, way: str) -> int:
    """Returns the bytes of operands and results over all runs.

    Args:
        row: The row of an equation.
        way: One of the ways to run it.
    """
    names, shapes = (*row.operands, *row.results), (*row.operand_shapes, *row.result_shapes)
    eight = way == EIGHT and _in_eight(row) == EIGHT

    def size(k: int, name: str) -> int:
        if way == PLANNED or not is_low(name):
            return item_size(name)
        return 4 if way == FULL else 1 if eight and k < 2 else 2

    sizes = [size(k, name) for k, name in enumerate(names)]
    return row.times * sum(n * math.prod(x) for n, x in zip(sizes, shapes, strict=True))


def _wide_reads(
    products: Sequence[Row], rows: Sequence[Row], elements: Mapping[str, int]
) -> np.ndarray:
    """Returns what products read of float32 arguments beside their 16-bit copies."""
    found: list[int] = []
    seen: set[str] = set()
    for row in products:
        extra = 0
        for k, name in enumerate(row.operands[:2]):
            path, stored = _argument(rows, row, k, seen)
            # One cast serves all readers: the first of them reads the argument as it is stored.
            if path in seen or not path or stored != FLOAT32.name or not is_low(name):
                continue
            seen.add(path)
            read = row.times * math.prod(row.operand_shapes[k])
            extra += (4 - item_size(name)) * min(read, elements.get(path, read))
        found.append(extra)
    return np.array(found)


def _argument(rows: Sequence[Row], row: Row, k: int, seen: Set[str]) -> tuple[str, str]:
    """Returns the path of the argument that an operand is, moved or cast, and its dtype there."""
    shape = row.operand_shapes[k]
    while not row.operand_inputs[k]:
        made = row.operand_rows[k]
        if made is None or made >= row.index:
            return "", ""
        maker = rows[made]
        if maker.inner:
            # What a loop takes apart is one of its operands, with a length in front.
            parts = enumerate(zip(maker.operand_inputs, maker.operand_shapes, strict=True))
            stacks = [j for j, (path, s) in parts if path and path not in seen and s[1:] == shape]
            if not stacks:
                return "", ""
            row, k = maker, stacks[0]
        elif maker.primitive in _HANDS_ON and maker.operand_inputs:
            row, k = maker, 0
        else:
            return "", ""
    return row.operand_inputs[k], row.declared_operands[k]
