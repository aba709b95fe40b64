"""`explain_compiled`: what a compiler made of a program, and whether that is what was planned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from ...autocast import Autocast
from ...policies.errors import wrong_type
from ..report.explain import explain, holds_autocast
from ..report.report import Report
from .against_plan import compared
from .arithmetic import flops_in
from .calls import calls
from .collectives import collectives
from .hlo import Module, dtype_name, parse
from .places import Place, place_of
from .products import Product, products, sums_of
from .report import (
    CompiledCast,
    CompiledCollective,
    CompiledLoop,
    CompiledProduct,
    CompiledReport,
)
from .sources import Made, compiled_from, is_made
from .traffic import Traffic, first_convert, traffic


def explain_compiled(
    program: Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled | str | os.PathLike[str],
    *args: Any,
    device: str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    plan: Report | None = None,
    **kwargs: Any,
) -> CompiledReport:
    """Reports what XLA made of a program: which products run in which dtypes, what casts and moves.

    A plan is a wish: the compiler widens, merges and drops. This compiles the program, runs
    nothing, and reads the text of the compiled module. A program with `autocast` in it is compared
    with its plan. Programs without are read as well.

    Args:
        program: A function, in `jax.jit` or not. Or what `jax.jit(fn).lower(...)` returns, or that
            compiled; the text of a compiled module; or the path of a file of an XLA dump
            (``XLA_FLAGS=--xla_dump_to=DIR``).
        *args: The positional arguments of the function, as arrays or ``jax.ShapeDtypeStruct``.
        device: A device that need not be there, for a function: ``"v5e"`` or ``"v5e:2x2"`` where
            ``libtpu`` is installed, ``"h100"`` where JAX's CUDA plugin is. None for the default.
        compiler_options: As `jax.jit` takes them.
        plan: What `explain` returned for the program, for one that is compiled already: a text, a
            file, a ``Lowered`` or ``Compiled``. A function needs none.
        **kwargs: The keyword arguments of the function.

    Returns:
        The report, for ``print(report)``, ``report.products`` and ``report.deviations``.

    Raises:
        TypeError: ``program`` is nothing of these, or ``plan`` is no report.
        ValueError: The text is no HLO module, the device is not known or its compiler not
            installed, or ``plan`` is of another program.

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
    if plan is not None and not isinstance(plan, Report):
        takes = "explain_compiled(plan=) takes the Report of a program"
        raise wrong_type(takes, plan, "Make one with explain(fn, *args).")
    made = compiled_from(program, args, kwargs, device, compiler_options)
    if plan is None and not is_made(program):
        plan = _plan_of(program, args, kwargs)
    return read(made, plan)


def _plan_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report | None:
    """Returns the plan of a function, None where no autocast is in it."""
    if isinstance(fn, Autocast):
        return explain(fn, *args, **kwargs) if fn.is_enabled else None
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    if not holds_autocast(jitted.trace(*args, **kwargs).jaxpr):
        return None
    return explain(fn, *args, **kwargs)


def read(made: Made, plan: Report | None = None) -> CompiledReport:
    """Returns what the text of a compiled module says, beside its plan if there is one.

    Args:
        made: The text, and what is known beside it.
        plan: The plan.
    """
    module = parse(made.text)
    found = traffic(module)
    multiplied = list(products(found, module))
    rows = tuple(_product(each, made.platform) for each in multiplied)
    wires = tuple(_collectives(found, module))
    against = None if plan is None else compared(plan, rows, wires)
    return CompiledReport(
        name=module.name,
        platform=made.platform,
        products=rows,
        casts=tuple(_casts(found, module)),
        collectives=wires,
        calls=tuple(calls(found, module)),
        loops=tuple(
            CompiledLoop(loop.steps, loop.times, *_where(place_of(loop.instruction, module)))
            for loop in found.loops
        ),
        memory=made.memory,
        nbytes=found.nbytes,
        flops=flops_in(module, loops=True)
        + sum(each.times * (each.flops or 0) for each in multiplied if each.is_call),
        kernels=found.launches,
        lines=len(module.instructions) + len(module.unread),
        unread=(*module.unread, *found.unread),
        deviations=against and against.deviations,
        unmatched_flops=against and against.unmatched_flops,
    )


def _where(place: Place) -> tuple[str, str]:
    return place.scope, place.source


def _product(each: Product, platform: str) -> CompiledProduct:
    return CompiledProduct(
        kind="convolution" if each.is_convolution else "dot",
        operands=(dtype_name(each.operands[0]), dtype_name(each.operands[1])),
        result=dtype_name(each.result),
        sums=dtype_name(sums_of(each, platform)),
        kernel=each.kernel,
        precision=each.precision,
        flops=None if each.flops is None else each.flops * each.times,
        times=each.times,
        scope=each.place.scope,
        source=each.place.source,
    )


def _casts(found: Traffic, module: Module) -> Iterator[CompiledCast]:
    for kernel in found.kernels:
        if (first := first_convert(kernel, module)) is not None:
            instruction, operand = first
            yield CompiledCast(
                dtype_name(operand),
                dtype_name(kernel.instruction.shapes[0].dtype),
                kernel.nbytes * kernel.times,
                kernel.times,
                *_where(place_of(instruction, module)),
            )


def _collectives(found: Traffic, module: Module) -> Iterator[CompiledCollective]:
    for each in collectives(found, module):
        kind, dtype = each.kind.split()
        nbytes = None if each.nbytes is None else each.nbytes * each.times
        place = place_of(each.kernel.instruction, module)
        yield CompiledCollective(kind, dtype_name(dtype), nbytes, each.times, *_where(place))
