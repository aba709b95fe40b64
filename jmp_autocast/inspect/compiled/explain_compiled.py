"""`explain_compiled`: the kernels and dtypes that a compiler chose for a program."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from ...call.arguments import check_function
from ...policies.errors import wrong_type
from .hlo import Module, UnreadableError, dtype_name, parse
from .kernels import cycles_of, kernel_of
from .products import name_of_product, products
from .report import CompiledReport
from .runs import Run, collective_of, inside_fusions, is_free, runs

Program = Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled | str

_COMPILED = (str, jax.stages.Lowered, jax.stages.Compiled)

# Each pattern matches text that only one platform's compiler writes. The first match decides the
# platform.
_PLATFORMS = (
    ("tpu", re.compile(r"\{[\d,]*:T\(|tpu_custom_call")),
    ("gpu", re.compile(r"__cu(?:blas|dnn)\$|__triton|__gpu\$|operation_queue_id|gpu_version")),
    ("cpu", re.compile(r"__(?:ynn|onednn)|xla_cpu|xla\.cpu|outer_dimension_partitions")),
)


def explain_compiled(
    program: Program,
    *args: Any,
    against: Program | None = None,
    **kwargs: Any,
) -> CompiledReport:
    """Reports the matmuls and convolutions, casts, copies and cycles of an XLA executable.

    A plan of `autocast` is a request: the compiler may still change dtypes, and merge or remove
    operations. This function compiles the program without running it, and parses the text of the
    optimized module. Only the TPU compiler estimates the cycles of kernels; it has no estimate for
    asynchronous copies.

    Args:
        program: A function, with or without `jax.jit`; the result of ``jax.jit(fn).lower(...)``,
            compiled or not; or the text of a compiled module, such as a file of an XLA dump.
        *args: The positional arguments of the function, as arrays or ``jax.ShapeDtypeStruct``.
        against: Another program to show beside the first, such as the same model in float32. If it
            is a function, it gets the same arguments.
        **kwargs: The keyword arguments of the function.

    Returns:
        The report, for ``print(report)``, ``report.products`` and ``report.cycles``.

    Raises:
        TypeError: ``program`` or ``against`` has none of these types, or ``program`` is no function
            and comes with arguments.
        ValueError: The text is no HLO module.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain_compiled
        >>> def layer(w, x):
        ...     with jax.named_scope("head"):
        ...         return jnp.tanh(x @ w)
        >>> report = explain_compiled(layer, jnp.ones((16, 4)), jnp.ones((8, 16)))
        >>> [(p.scope, p.operands, p.flops) for p in report.products]
        [('head', ('float32', 'float32'), 1024)]
    """
    report = _report(*_compiled(program, args, kwargs, "explain_compiled"))
    if against is None:
        return report
    if isinstance(against, _COMPILED):
        args, kwargs = (), {}
    other = _report(*_compiled(against, args, kwargs, "explain_compiled(against=)"))
    return dataclasses.replace(report, against=other)


_Compiled: TypeAlias = tuple[str, str, int | None]
"""The text of a module, its platform or ``""``, and the bytes of XLA's temporary buffers."""


def _compiled(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by: str) -> _Compiled:
    """Compiles a program if it is not compiled yet; ``by`` is the caller's name for messages."""
    if isinstance(program, _COMPILED):
        if args or kwargs:
            takes = f"{by} takes arguments for a function alone"
            fix = "It is lowered or compiled already: leave them out, or pass the function."
            raise wrong_type(takes, program, fix)
        if isinstance(program, str):
            return program, platform_of(program), None
        if isinstance(program, jax.stages.Lowered):
            program = program.compile()
        return _of_executable(program)
    fix = (
        "Pass the function itself, then its arguments; or a Lowered, a Compiled, or the text of a "
        "module: of a file path.read_text()."
    )
    check_function(program, by, fix)
    jitted: Any = program if hasattr(program, "lower") else jax.jit(program)
    return _of_executable(jitted.lower(*args, **kwargs).compile())


def _of_executable(compiled: jax.stages.Compiled) -> _Compiled:
    try:
        text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        # jaxlib 0.10 cannot print asynchronous operations of libtpu on a v6e and a v5p.
        raise UnreadableError(
            f"XLA cannot print its executable: {' '.join(str(error).split())[:120]}. Dump it "
            "instead (XLA_FLAGS=--xla_dump_to=DIR), and pass the text of the file whose name ends "
            "in after_optimizations.txt."
        ) from None
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platforms = {device.platform for each in shardings for device in each.device_set}
    platform = platforms.pop() if len(platforms) == 1 else ""
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    memory: Any = compiled.memory_analysis()
    temporary = None if memory is None else memory.temp_size_in_bytes
    return text, platform or platform_of(text), temporary


def platform_of(text: str) -> str:
    """Returns the platform of a compiled module, or ``""`` if it is unknown."""
    return next((name for name, mark in _PLATFORMS if mark.search(text)), "")


def _report(text: str, platform: str, temporary: int | None) -> CompiledReport:
    module = parse(text)
    # Only one branch of a conditional counts: the branch with the most cycles or, on devices
    # without cycles, the branch with the most bytes of results.
    found = list(runs(module, lambda run: cycles_of(run) or run.times * run.instruction.nbytes))
    kernels = [run for run in found if run.is_kernel]
    collectives = collections.Counter[str]()
    for run in found:
        if (name := collective_of(run.instruction)) is not None:
            operand = run.within.get(run.instruction.operands[0])
            dtype = dtype_name(operand.shapes[0].dtype) if operand else "?"
            collectives[f"{name} {dtype}"] += run.times
    return CompiledReport(
        name=module.name,
        platform=platform,
        products=tuple(x for run in kernels for x in products(run, module, platform)),
        kernels=tuple(kernel_of(run, module) for run in kernels),
        collectives=dict(collectives),
        calls=tuple(name for run in kernels for name in _opaque_calls(run, module)),
        loops_of_unknown_length=sum(run.is_loop and run.steps is None for run in found),
        temporary=temporary,
        unread=module.unread,
    )


def _opaque_calls(run: Run, module: Module) -> list[str]:
    """Returns the targets of a kernel's custom calls, except known matmuls and convolutions."""
    inside = inside_fusions(run.instruction, run.within, module)
    parts = [run.instruction, *(inner for inner, _ in inside)]
    calls = [part for part in parts if part.opcode == "custom-call" and not is_free(part)]
    return [call.target for call in calls if name_of_product(call) is None]
