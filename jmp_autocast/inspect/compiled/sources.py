"""What a user may ask about: a function, what JAX lowered or compiled, or a text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from ...call.arguments import check_function
from ...policies.errors import wrong_type
from .hlo import UnreadableError

# What the text of each compiler has and that of the others has not, in this order.
_PLATFORMS = (
    ("tpu", re.compile(r"\{[\d,]*:T\(|tpu_custom_call")),
    ("gpu", re.compile(r"__cu(?:blas|dnn)\$|__triton|__gpu\$|operation_queue_id|gpu_version")),
    ("cpu", re.compile(r"__(?:ynn|onednn)|xla_cpu|xla\.cpu|outer_dimension_partitions")),
)

COMPILED = (str, jax.stages.Lowered, jax.stages.Compiled)
"""What is lowered or compiled already."""


class Made(NamedTuple):
    """The text of a compiled program, and what is known beside it.

    Args:
        text: The text of the module.
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``, ``""`` if it is not known.
        temporary: The bytes of the compiler's own buffers, None if they are not known.
    """

    text: str
    platform: str
    temporary: int | None


def compiled_from(
    program: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any] | None,
    by: str = "explain_compiled",
) -> Made:
    """Returns the text of what a user asks about, compiled where it is not yet.

    Raises:
        TypeError: It is nothing of the kind, or arguments are given for what takes none; ``by``
            says which argument it is.
    """
    options = dict(options) if options else None
    if isinstance(program, COMPILED):
        if args or kwargs:
            takes = f"{by} takes arguments for a function alone"
            fix = "It is lowered or compiled already: leave them out, or pass the function."
            raise wrong_type(takes, program, fix)
        if isinstance(program, str):
            return Made(program, platform_of(program), None)
        if isinstance(program, jax.stages.Lowered):
            program = program.compile(options)
        return _of_compiled(program)
    fix = (
        "Pass the function itself, then its arguments; or a Lowered, a Compiled, or the text of a "
        "module: of a file path.read_text()."
    )
    check_function(program, by, fix)
    jitted: Any = program if hasattr(program, "lower") else jax.jit(program)
    return _of_compiled(jitted.lower(*args, **kwargs).compile(options))


def _of_compiled(compiled: jax.stages.Compiled) -> Made:
    try:
        text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        # jaxlib 0.10 cannot print what libtpu does asynchronously on a v6e and a v5p.
        raise UnreadableError(
            f"XLA cannot print what it compiled: {' '.join(str(error).split())[:120]}. Dump it "
            "instead (XLA_FLAGS=--xla_dump_to=DIR), and pass the text of the file whose name ends "
            "in after_optimizations.txt."
        ) from None
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platforms = {device.platform for each in shardings for device in each.device_set}
    platform = next(iter(platforms)) if len(platforms) == 1 else ""
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    memory: Any = compiled.memory_analysis()
    temporary = None if memory is None else memory.temp_size_in_bytes
    return Made(text, platform or platform_of(text), temporary)


def platform_of(text: str) -> str:
    """Returns which compiler wrote a text: ``"cpu"``, ``"gpu"``, ``"tpu"``, or ``""``."""
    return next((name for name, mark in _PLATFORMS if mark.search(text)), "")
