"""Reads the text of an optimized HLO module, as ``compiled.as_text()`` returns it.

The text is what all compilers of XLA share. `memory_analysis()` says nothing about traffic,
`cost_analysis()` counts the body of a loop once and is None for a GPU without a device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    **dict.fromkeys(("s1", "u1"), 1),
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    "c128": 128,
    "token": 0,
    "opaque": 0,
}

_COMMENT = re.compile(r"/\*.*?\*/")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array as the compiler stores it.

    Args:
        dtype: HLO's name, such as ``bf16``.
        dims: Its dimensions.
        on_chip: It lies in a memory of the chip: the compiler placed it in the vector memory of a
            TPU, layout ``S(1)``, so that reading it costs no traffic to the large memory.
    """

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Its bytes in the large memory: 0 for one that lies on the chip."""
        return 0 if self.on_chip else self.elements * bits_of(self.dtype) // 8


def bits_of(dtype: str) -> int:
    """Returns the bits of an element."""
    if dtype.startswith("f8"):  # f8e4m3fn, f8e5m2, f8e4m3b11fnuz and so on
        return 8
    return BITS[dtype]  # an unknown dtype must not count as nothing


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Args:
        name: Its name, without ``%``.
        opcode: Such as ``fusion``.
        shapes: The arrays of its result; several where it is a tuple.
        operands: The names of its operands.
        attributes: The rest of the line, from the closing bracket of the operands on.
        inside: What stands in those brackets: for a constant its value, for a parameter its number.
        is_root: The computation returns it.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    inside: str
    is_root: bool

    @property
    def nbytes(self) -> int:
        """The bytes of its result in the large memory."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def elements(self) -> int:
        """The elements of its result."""
        return sum(shape.elements for shape in self.shapes)

    def attribute(self, name: str) -> str | None:
        """Returns the value of an attribute such as ``dim_labels``, None without one."""
        found = re.search(rf"[ ,]{name}=(\{{[^}}]*\}}|[^\s,]+)", self.attributes)
        return found[1] if found else None

    def called(self, name: str) -> str | None:
        """Returns the name of the computation in an attribute such as ``body``."""
        value = self.attribute(name)
        return value.lstrip("%") if value else None


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed module.

    Args:
        computations: Each computation by its name: its instructions by their names, in order.
        entry: The name of the computation that the program starts with.
    """

    computations: Mapping[str, Computation]
    entry: str

    def body(self, instruction: Instruction, attribute: str) -> Computation:
        """Returns the computation that an instruction calls by an attribute such as ``calls``."""
        name = instruction.called(attribute)
        if name not in self.computations:
            raise ValueError(f"{instruction.name} calls {name}, which the module does not have.")
        return self.computations[name]

    @functools.cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions, each once, those inside fusions and loops too."""
        return tuple(i for c in self.computations.values() for i in c.values())


def parse(text: str) -> Module:
    """Parses the text of a module."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line.strip():
            continue
        if not line[0].isspace():
            head = _HEAD.match(line) if "->" in line else None
            current = computations.setdefault(head[2], {}) if head else None
            entry = head[2] if head and head[1] else entry
        elif current is not None and (found := _LINE.match(line)):
            made = _instruction(found, _COMMENT.sub("", line[found.end() :]))
            current[made.name] = made
    if not entry:
        raise ValueError("The text has no ENTRY computation: it is no HLO module.")
    return Module(computations, entry)


def _instruction(found: re.Match[str], rest: str) -> Instruction:
    # `(f32[8]{0:T(1024)}, s32[]) while(%tuple), condition=%c, body=%b`: layouts hold brackets too,
    # so that the end of the result and of the operands is found by counting.
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opcode, rest = rest.split("(", 1)
    end = _closing("(" + rest, 0) - 2
    inside = rest[:end]
    return Instruction(
        name=found[2],
        opcode=opcode,
        shapes=tuple(shapes_in(result)),
        operands=tuple(_NAME.findall(inside)),
        attributes=rest[end + 1 :],
        inside=inside,
        is_root=bool(found[1]),
    )


def _closing(text: str, start: int) -> int:
    """Returns the position behind the bracket that closes the one at ``start``."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return position + 1
    raise ValueError(f"No closing bracket in {text[:80]}")


def shapes_in(text: str) -> Iterator[Shape]:
    """Yields each array of a shape's text, such as ``(f32[8,128]{1,0}, s32[])``."""
    for dtype, dims, layout in _SHAPE.findall(text):
        sizes = tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n)
        yield Shape(dtype, sizes, on_chip=bool(re.search(r"S\([1-9]\d*\)", layout)))
