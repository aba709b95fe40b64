"""`explain_compiled`: what a compiler made of a program."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .hlo import Module, dtype_name, parse
from .kernels import cycles_of, kernel_of
from .products import name_of_product, products
from .report import CompiledReport
from .runs import Run, collective_of, inside_fusions, is_free, runs
from .sources import COMPILED, Made, compiled_from

Program = Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled | str


def explain_compiled(
    program: Program,
    *args: Any,
    against: Program | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> CompiledReport:
    """Reports what XLA made of a program: products by dtype, casts and copies, estimated cycles.

    A plan is a wish: the compiler widens, merges and drops. This compiles the program, runs
    nothing, and reads the text of the compiled module. Cycles are known of programs for TPUs: they
    are the compiler's estimate, which leaves out asynchronous copies.

    Args:
        program: A function, in `jax.jit` or not. Or what `jax.jit(fn).lower(...)` returns, or that
            compiled, or the text of a compiled module, such as a file of an XLA dump has it.
        *args: The positional arguments of the function, as arrays or ``jax.ShapeDtypeStruct``.
        against: Another program, to be shown beside it: by hand or in float32. A function takes the
            same arguments.
        compiler_options: As `jax.jit` takes them.
        **kwargs: The keyword arguments of the function.

    Returns:
        The report, for ``print(report)``, ``report.products`` and ``report.cycles``.

    Raises:
        TypeError: ``program`` or ``against`` is nothing of these.
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
    report = _read(compiled_from(program, args, kwargs, compiler_options))
    if against is None:
        return report
    if isinstance(against, COMPILED):
        args, kwargs = (), {}
    by = "explain_compiled(against=)"
    other = _read(compiled_from(against, args, kwargs, compiler_options, by))
    return dataclasses.replace(report, against=other)


def _read(made: Made) -> CompiledReport:
    """Returns what the text of a compiled module says."""
    module = parse(made.text)
    found = list(runs(module, _weight))
    kernels = [run for run in found if run.is_kernel]
    exchanges = collections.Counter[str]()
    for run in found:
        if (name := collective_of(run.instruction)) is not None:
            operand = run.within.get(run.instruction.operands[0])
            dtype = dtype_name(operand.shapes[0].dtype) if operand else "?"
            exchanges[f"{name} {dtype}"] += run.times
    return CompiledReport(
        name=module.name,
        platform=made.platform,
        products=tuple(x for run in kernels for x in products(run, module, made.platform)),
        kernels=tuple(kernel_of(run, module) for run in kernels),
        collectives=dict(exchanges),
        calls=tuple(name for run in kernels for name in _calls(run, module)),
        loops_of_unknown_length=sum(run.is_loop and run.steps is None for run in found),
        temporary=made.temporary,
        unread=module.unread,
    )


def _weight(run: Run) -> int:
    """Returns what decides which branch of a conditional counts: cycles, or bytes of results."""
    return cycles_of(run) or run.times * run.instruction.nbytes


def _calls(run: Run, module: Module) -> list[str]:
    """Returns the targets of custom calls in a kernel that are no products."""
    inside = inside_fusions(run.instruction, run.within, module)
    parts = [run.instruction, *(inner for inner, _ in inside)]
    calls = [part for part in parts if part.opcode == "custom-call" and not is_free(part)]
    return [call.target for call in calls if name_of_product(call) is None]
