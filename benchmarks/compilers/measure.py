"""Compiles a program, and reads what it costs from what the compiler made of it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from jmp_autocast.inspect.compiled.hlo import parse
from jmp_autocast.inspect.compiled.kernels import cycles_of, kernel_of
from jmp_autocast.inspect.compiled.products import products

from .collectives import collectives
from .programs import Program
from .traffic import traffic


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one program; bytes, FLOPs and seconds. None: it did not compile.

    Args:
        temporary: The compiler's temporary bytes, or what its out-of-memory message asks for.
        arguments: The bytes of the arguments; donated ones are also those of the results.
        cycles: The cycles that the TPU compiler estimates, without asynchronous copies.
        traffic: The bytes that kernels read and write, loops multiplied.
        flops: Of matrix products and convolutions, loops multiplied.
        kernels: How many kernels run.
        converts: The converts in the text, those inside fusions too; in a loop they count once.
        convert_kernels: The kernels that run and only convert.
        products: How often each kind of product runs, and its FLOPs.
        collectives: How often each kind of collective runs, and the bytes that a device sends.
        wire: The bytes that a device sends.
        trace_seconds: For tracing and lowering, CPU seconds of this process.
        compile_seconds: Wall seconds.
        note: What went wrong: out of memory, a text that XLA cannot print, or loops of unknown
            length.
    """

    temporary: float | None = None
    arguments: int | None = None
    cycles: int | None = None
    traffic: int | None = None
    flops: int | None = None
    kernels: int | None = None
    converts: int | None = None
    convert_kernels: int | None = None
    products: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    collectives: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    wire: int | None = None
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    note: str = ""


def read(text: str) -> Row:
    """Returns what the text of an optimized module says."""
    module = parse(text)
    found = traffic(module)
    multiplied = _by_kind(
        (f"{p.kind} {' x '.join(p.operands)} -> {p.result}", p.times, p.flops)
        for kernel in found.kernels
        for p in products(kernel.run, module, "")
    )
    cycles = [cycles_of(kernel.run) for kernel in found.kernels]
    sent = _by_kind(
        (c.kind, c.times, c.times * (c.nbytes or 0)) for c in collectives(found, module)
    )
    return Row(
        cycles=sum(filter(None, cycles)) if any(cycles) else None,
        traffic=found.nbytes,
        flops=sum(flops for _, flops in multiplied.values()),
        kernels=found.launches,
        converts=sum(
            each.opcode == "convert"
            for body in module.computations.values()
            for each in body.values()
        ),
        convert_kernels=sum(
            k.run.times for k in found.kernels if kernel_of(k.run, module).kind == "cast"
        ),
        products=multiplied,
        collectives=sent,
        wire=sum(nbytes for _, nbytes in sent.values()),
        note="; ".join(_notes(found.unknown_loops, (*module.unread, *found.unread))),
    )


def _by_kind(items: Iterable[tuple[str, int, int | None]]) -> dict[str, tuple[int, int]]:
    """Adds up how often each kind runs, and its FLOPs or bytes; the largest first."""
    groups: dict[str, list[int]] = {}
    for kind, times, amount in items:
        count = groups.setdefault(kind, [0, 0])
        count[0] += times
        count[1] += amount or 0
    ordered = sorted(groups.items(), key=lambda group: -group[1][1])
    return {kind: (times, amount) for kind, (times, amount) in ordered}


def _notes(loops: Sequence[str], unread: Sequence[str]) -> Iterator[str]:
    if loops:
        yield f"counted once: {', '.join(loops)}"
    if unread:
        yield f"not understood: {len(unread)} lines"


def measure(program: Program) -> tuple[Row, str]:
    """Compiles a program; returns what was measured, and the text of the optimized module."""
    jax.clear_caches()  # the trace of one variant must not shorten that of the next
    start = time.process_time()
    lowered = program.trace().lower()
    traced = time.process_time() - start
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return dataclasses.replace(_failed(str(error)), trace_seconds=traced), str(error)
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        # jaxlib 0.10 cannot print what libtpu does asynchronously on a v6e and a v5p.
        text = str(error)
        found = Row(note=f"XLA cannot print it: {' '.join(text.split())[:80]}")
    else:
        found = read(text)
    row = dataclasses.replace(
        found,
        temporary=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        trace_seconds=traced,
        compile_seconds=seconds,
    )
    return row, text


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _failed(message: str) -> Row:
    """Returns the row of a program that the chip's memory does not hold."""
    found = re.search(r"HLO temporaries \(([\d.]+)([KMG]?)\)? exceeds", message)
    found = found or re.search(r"HLO temp\w*\s+([\d.]+)([KMG]?)", message)
    if not found:
        return Row(note=" ".join(message.split())[:200])
    return Row(temporary=float(found[1]) * _UNITS[found[2]], note="out of memory")


def as_json(row: Row) -> dict[str, Any]:
    """Returns a row as JSON holds it."""
    return dataclasses.asdict(row)
