"""Parses the text of an HLO module, as ``compiled.as_text()`` returns it and XLA dumps it.

XLA prints this text for every platform. ``compiled.cost_analysis()`` is no substitute: it counts
the body of a loop once, has no dtypes, and is None for a GPU program compiled without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_COMMENT = re.compile(r"/\*.*?\*/")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_END = re.compile(r"\}(, execution_thread=\"[^\"]*\")?$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OPERAND = re.compile(r"(?:^|[\s,(%])([A-Za-z_][\w.\-]*)(?=\s*(?:,|$))")
# The brackets after these opcodes hold no operands.
_LEAVES = frozenset(("parameter", "constant", "iota", "partition-id", "replica-id"))


class UnreadableError(ValueError):
    """A text is no complete HLO module; the message names a text to pass instead."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array as the compiler stores it.

    Args:
        dtype: HLO's name of the dtype, such as ``bf16``.
        dims: The dimensions.
        on_chip: Whether the array is in the vector memory of a TPU, layout ``S(1)``: loading it
            causes no traffic to main memory.
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
        """The bytes of the array in main memory: 0 if it is on the chip."""
        return 0 if self.on_chip else self.elements * bits_of(self.dtype) // 8


_LETTERS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


def dtype_name(name: str) -> str:
    """Returns NumPy's name of an HLO dtype; any other text is returned as it is.

    Example:
        >>> [dtype_name(name) for name in ("bf16", "f8e4m3fn", "s8", "pred", "token")]
        ['bfloat16', 'float8_e4m3fn', 'int8', 'bool', 'token']
    """
    if name == "pred":
        return "bool"
    found = re.fullmatch(r"(bf|[fsuc])(\d+)(e\w+)?", name)
    if found is None:
        return name
    return f"{_LETTERS[found[1]]}{found[2]}{'_' + found[3] if found[3] else ''}"


@functools.cache
def bits_of(dtype: str) -> int:
    """Returns the bits of an element: the first number in HLO's name of the dtype.

    Example:
        >>> bits_of("bf16"), bits_of("f8e4m3fn"), bits_of("pred"), bits_of("token")
        (16, 8, 8, 0)
    """
    if dtype in ("token", "opaque"):
        return 0
    found = re.search(r"\d+", dtype.replace("pred", "8"))
    if found is None:  # an unknown dtype must not count as 0 bits
        raise ValueError(f"{dtype} is no dtype of HLO.")
    return int(found[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Args:
        name: The name, without ``%``.
        opcode: The opcode, such as ``fusion``.
        shapes: The shape of the result; several for a tuple.
        operands: The names of the operands.
        attributes: The rest of the line, after the closing bracket of the operands.
        inside: The text in the brackets of the operands, such as the value of a constant.
        is_root: Whether the computation returns the result.
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
        """The bytes of the result in main memory."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def target(self) -> str:
        """The target of a custom call, ``""`` for any other instruction."""
        return (self.attribute("custom_call_target") or "").strip('"')

    def attribute(self, name: str) -> str | None:
        """Returns the value of an attribute such as ``dim_labels``, None if it is absent."""
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
        name: The name of the module, such as ``jit_step``.
        computations: Each computation by name: a mapping of its instructions by name, in order.
        entry: The name of the entry computation.
        unread: The lines of computations that could not be parsed.
        header: The text before the first computation: options, and the tables of source lines.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    unread: tuple[str, ...] = ()
    header: str = ""

    def body(self, instruction: Instruction, attribute: str) -> Computation:
        """Returns the computation named by an attribute such as ``calls``."""
        name = instruction.called(attribute)
        if name is None or name not in self.computations:
            raise UnreadableError(
                f"{instruction.name} calls {name}, which the text does not have: it is a part of a "
                "module. Pass the whole text."
            )
        return self.computations[name]


def parse(text: str) -> Module:
    """Parses the text of a module.

    Raises:
        UnreadableError: The text has no entry computation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> module = parse(jax.jit(jnp.sin).lower(1.0).compile().as_text())
        >>> module.name, module.entry in module.computations
        ('jit_sin', True)
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current, unread, header = "", None, [], []
    for line in _whole_lines(text.splitlines()):
        if not line.strip():
            continue
        if not line[0].isspace():
            head = _HEAD.match(line) if "->" in line else None
            current = computations.setdefault(head[2], {}) if head else None
            entry = head[2] if head and head[1] else entry
            if not computations:
                header.append(line)
        elif current is None:
            header.append(line)
        elif (made := _read(_COMMENT.sub("", line))) is not None:
            current[made.name] = made
        else:
            unread.append(line.strip())
    if not entry:
        raise UnreadableError(
            "The text has no ENTRY computation, so it is no HLO module; it starts "
            f"{' '.join(text.split())[:60]!r}. Pass the function, its Lowered (StableHLO is the "
            "input of the compiler, and not its output), the result of compiled.as_text(), or "
            "path.read_text() of a file of an XLA dump (XLA_FLAGS=--xla_dump_to=DIR) whose name "
            "ends in after_optimizations.txt."
        )
    name = re.match(r"HloModule ([^\s,]+)", text.lstrip())
    return Module(name[1] if name else "", computations, entry, tuple(unread), "\n".join(header))


def _whole_lines(lines: Sequence[str]) -> Iterator[str]:
    """Yields lines; an instruction with line breaks in its metadata becomes one line."""
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if _LINE.match(line) and not _is_whole(line):
            parts, end = [line], at
            while end < len(lines) and not _LINE.match(lines[end]) and not _END.match(lines[end]):
                parts.append(lines[end])
                end += 1
                if _is_whole("".join(parts)):
                    line, at = "".join(parts), end
                    break
        yield line


def _is_whole(line: str) -> bool:
    bare = _QUOTED.sub("", line)
    pairs = all(bare.count(a) == bare.count(b) for a, b in ("()", "{}", "[]"))
    return pairs and '"' not in bare


def _read(line: str) -> Instruction | None:
    """Returns the instruction of a line, None for any other text."""
    found = _LINE.match(line)
    if found is None:
        return None
    rest = line[found.end() :]
    try:
        # `(f32[8]{0:T(1024)}, s32[]) while(%tuple), condition=%c, body=%b`: layouts hold brackets,
        # so the ends of the result and of the operands are found by counting brackets.
        end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
        result, rest = rest[:end], rest[end:].lstrip()
        opcode, rest = rest.split("(", 1)
        end = _closing("(" + rest, 0) - 2
        shapes = tuple(shapes_in(result))
        _ = [shape.nbytes for shape in shapes]
    except ValueError:
        return None
    inside = rest[:end]
    return Instruction(
        name=found[2],
        opcode=opcode,
        shapes=shapes,
        operands=() if opcode in _LEAVES else _operands(inside),
        attributes=rest[end + 1 :],
        inside=inside,
        is_root=bool(found[1]),
    )


def _operands(inside: str) -> tuple[str, ...]:
    # XLA writes `%a, f32[8,128]{1,0} %b`, or without `%`: `f32[8,128]{1,0} a, b`.
    return tuple(re.findall(r"%([\w.\-]+)", inside) or _OPERAND.findall(inside))


def _closing(text: str, start: int) -> int:
    """Returns the position after the bracket that closes the one at ``start``."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return position + 1
    raise ValueError(f"No closing bracket in {text[:80]}")


def shapes_in(text: str) -> Iterator[Shape]:
    """Yields the shapes in a text such as ``(f32[8,128]{1,0}, s32[])``."""
    for dtype, dims, layout in _SHAPE.findall(text):
        sizes = tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n)
        yield Shape(dtype, sizes, on_chip=bool(re.search(r"S\([1-9]\d*\)", layout)))
