"""The memory of a compiled program: of the compiler's own analysis, or of a buffer assignment."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """The bytes that a compiled program holds on each device.

    Args:
        temporary: The compiler's own buffers.
        arguments: The arguments.
        results: The results; None where a buffer assignment does not tell them apart.
        aliased: The results that are written into donated arguments; None as for the results.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import explain_compiled
        >>> explain_compiled(jnp.sin, jnp.ones(1000)).memory.arguments
        4000
    """

    temporary: int
    arguments: int
    results: int | None = None
    aliased: int | None = None


def memory_of(compiled: Any) -> CompiledMemory | None:
    """Returns what a `jax.stages.Compiled` says of its memory, None if it says nothing.

    Args:
        compiled: The compiled program.
    """
    found = compiled.memory_analysis()
    if found is None:
        return None
    return CompiledMemory(
        found.temp_size_in_bytes,
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
    )


def memory_beside(path: pathlib.Path) -> CompiledMemory | None:
    """Returns the memory by the buffer assignment that XLA dumps beside a module, None without one.

    Args:
        path: The file with the text of the module.
    """
    beside = path.with_name(f"{path.stem}-buffer-assignment.txt")
    if not beside.is_file():
        return None
    text = beside.read_text(encoding="utf-8", errors="replace")
    found = [(int(size), said) for size, said in _ALLOCATION.findall(text)]
    return CompiledMemory(
        sum(size for size, said in found if "temp" in said),
        sum(size for size, said in found if re.search(r"\bparameter \d", said)),
    )
