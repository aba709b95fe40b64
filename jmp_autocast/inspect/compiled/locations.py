"""The location of an instruction: the scope and the source line in its metadata."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from .hlo import Instruction, Module

_METADATA = re.compile(r'(?<!\w)metadata=\{((?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*)\}')
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s,}]+)')
_ENTRY = re.compile(r'^(\d+) (".*"|\{.*\})$')
# JAX writes these names of enclosing calls between the user's scopes.
_CALLS = re.compile(
    r"(jit|pjit|checkpoint|remat|closed_call|core_call|shard_map|custom_jvp_call|custom_vjp_call|eval_jaxpr)"
    r"(\(.*\))?$|(while|body|cond|scan|main|rematted_computation|branch_\d+_fun|autocast\[.*\])$"
)
_WRAPPED = re.compile(r"(?:jvp|transpose|vmap|linearize)\((.*)\)$")


class Location(NamedTuple):
    """The origin of an instruction in the user's program.

    Args:
        scope: The enclosing scopes, joined by ``/``.
        operation: The name of JAX's primitive, such as ``dot_general``.
        source: The file and line, ``""`` if the text lacks them.
    """

    scope: str
    operation: str
    source: str


def location_of(instruction: Instruction, module: Module) -> Location:
    """Returns the location of an instruction."""
    found = _METADATA.search(instruction.attributes)
    fields = {k: v.strip('"') for k, v in _FIELD.findall(found[1])} if found else {}
    *scopes, operation = _split(fields.get("op_name", ""))
    names = [name for scope in scopes if (name := _name(scope))]
    if "source_file" in fields:
        source = f"{fields['source_file']}:{fields.get('source_line', '')}"
    else:
        source = _frames(module.header).get(fields.get("stack_frame_id", ""), "")
    return Location("/".join(names), operation, source)


def _split(text: str) -> list[str]:
    """Splits a text at slashes, except at slashes in brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _name(scope: str) -> str:
    while found := _WRAPPED.match(scope):
        scope = found[1]
    return "" if _CALLS.match(scope) else scope


@functools.lru_cache(maxsize=8)
def _frames(header: str) -> dict[str, str]:
    """Returns the source line of each stack frame, from tables that JAX 0.12 adds to the header."""
    tables: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in header.splitlines():
        if found := _ENTRY.match(line.strip()):
            current[found[1]] = found[2]
        else:
            current = tables.setdefault(line.strip(), {})
    files, lines = tables.get("FileNames", {}), {}
    for number, text in tables.get("FileLocations", {}).items():
        fields = dict(_FIELD.findall(text))
        file = files.get(fields.get("file_name_id", ""), "").strip('"')
        lines[number] = f"{file}:{fields.get('line', '')}" if file else ""
    return {
        number: lines.get(dict(_FIELD.findall(text)).get("file_location_id", ""), "")
        for number, text in tables.get("StackFrames", {}).items()
    }
