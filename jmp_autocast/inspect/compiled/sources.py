"""What a user may ask about: a function, what JAX lowered or compiled, a text, a file of a dump."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from ...call.arguments import check_function
from ...policies.errors import wrong_type
from . import targets
from .hlo import UnreadableError
from .memory import CompiledMemory, memory_beside, memory_of

# What the text of each compiler has and that of the others has not, in this order.
_PLATFORMS = (
    ("tpu", re.compile(r"\{[\d,]*:T\(|tpu_custom_call")),
    ("gpu", re.compile(r"__cu(?:blas|dnn)\$|__triton|__gpu\$|operation_queue_id|gpu_version")),
    ("cpu", re.compile(r"__(?:ynn|onednn)|xla_cpu|xla\.cpu|outer_dimension_partitions")),
)
_NAMED = re.compile(r"\.(cpu|gpu|tpu|sm_[\d.]+_gpu)_after_optimizations")


class Made(NamedTuple):
    """The text of a compiled program, and what is known beside it.

    Args:
        text: The text of the module.
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``, ``""`` if it is not known.
        memory: Its memory, None if it is not known.
    """

    text: str
    platform: str
    memory: CompiledMemory | None


def compiled_from(
    program: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str | None,
    options: Mapping[str, Any] | None,
) -> Made:
    """Returns the text of what a user asks about, compiled where it is not yet.

    Raises:
        TypeError: It is nothing of the kind, or arguments are given for what takes none.
        ValueError: There is no such file or device, or its compiler is not installed.
    """
    options = dict(options) if options else None
    if is_made(program):
        for name, given in (("arguments", args or kwargs), ("device=", device)):
            if given:
                fix = "It is lowered or compiled already: leave them out, or pass the function."
                raise wrong_type(
                    f"explain_compiled takes {name} for a function alone", program, fix
                )
    if isinstance(program, str | os.PathLike):
        return _read(program)
    if isinstance(program, jax.stages.Compiled):
        return _of_compiled(program)
    if isinstance(program, jax.stages.Lowered):
        return _of_compiled(program.compile(options))
    fix = "Pass the function itself, then its arguments; or a Lowered, a Compiled, a text, a file."
    check_function(program, "explain_compiled", fix)
    return _of_function(program, args, kwargs, device, options)


def is_made(program: Any) -> bool:
    """Whether a program is no function, but what was made of one."""
    return isinstance(program, str | os.PathLike | jax.stages.Compiled | jax.stages.Lowered)


def _of_function(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str | None,
    options: dict[str, Any] | None,
) -> Made:
    if device is not None:
        target, topology = targets.parse_target(device)
        try:
            place = SingleDeviceSharding(targets.devices(target, 1, topology)[0])
        except targets.NotInstalled as error:
            raise UnreadableError(f"device={device!r}: {error}") from None
        args, kwargs = jax.tree.map(lambda leaf: _placed(leaf, place), (args, kwargs))
        if target in targets.GPUS:
            options = {**targets.GPU_OPTIONS, **(options or {})}
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    return _of_compiled(jitted.lower(*args, **kwargs).compile(options))


def _placed(leaf: Any, place: SingleDeviceSharding) -> Any:
    """Returns the shape of an array on a device that is not there; one that lies there stays."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return leaf
    own = getattr(leaf, "sharding", None) if isinstance(leaf, jax.ShapeDtypeStruct) else None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=own or place)


def _of_compiled(compiled: jax.stages.Compiled) -> Made:
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        # jaxlib 0.10 cannot print what libtpu does asynchronously on a v6e and a v5p.
        raise UnreadableError(
            f"XLA cannot print what it compiled: {' '.join(str(error).split())[:120]}. Dump it "
            "instead (XLA_FLAGS=--xla_dump_to=DIR), and pass the file whose name ends in "
            "after_optimizations.txt."
        ) from None
    text = text or ""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platforms = {device.platform for each in shardings for device in each.device_set}
    platform = next(iter(platforms)) if len(platforms) == 1 else ""
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    return Made(text, platform or platform_of(text), memory_of(compiled))


def _read(program: str | os.PathLike[str]) -> Made:
    if isinstance(program, str) and ("\n" in program or program.startswith("HloModule")):
        return Made(program, platform_of(program), None)
    path = _file(pathlib.Path(program))
    text = path.read_text(encoding="utf-8", errors="replace")
    named = _NAMED.search(path.name)
    platform = named[1].rpartition("_")[2] if named else platform_of(text)
    if "before_optimizations" in path.name:
        raise UnreadableError(
            f"{path.name} is the program before XLA optimised it. Pass the file of the same module "
            "whose name ends in after_optimizations.txt."
        )
    return Made(text, platform, memory_beside(path))


def _file(path: pathlib.Path) -> pathlib.Path:
    """Returns the file, for a folder that with the one module in it."""
    if path.is_dir():
        found = sorted(path.glob("*after_optimizations.txt"))
        if len(found) != 1:
            names = ", ".join(each.name for each in found[:5]) or "none"
            raise UnreadableError(
                f"{path} holds {len(found)} files of optimised modules ({names}). Pass one file "
                "whose name ends in after_optimizations.txt."
            )
        return found[0]
    if not path.is_file():
        raise UnreadableError(
            f"explain_compiled got the text {str(path)[:80]!r}, which is neither an HLO module nor "
            "a file. Pass what compiled.as_text() returns, or the path of a file of an XLA dump."
        )
    return path


def platform_of(text: str) -> str:
    """Returns which compiler wrote a text: ``"cpu"``, ``"gpu"``, ``"tpu"``, or ``""``."""
    return next((name for name, mark in _PLATFORMS if mark.search(text)), "")
