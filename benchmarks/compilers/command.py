"""What the commands do: compile every program that is asked for, and print a table for each model.

A line is printed for each program when it is compiled, so that a run that is stopped has told what
it knows; the tables with the ratios follow.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
from comparison import tables

from . import batches, optimizers, report, sharding
from .measure import Row, as_json, measure
from .programs import (
    CASES,
    DEFAULTS,
    HAND,
    LOSSES,
    QUICK_CASES,
    Program,
    training_program,
    with_sizes,
)
from .targets import TPUS, devices

RESULTS = pathlib.Path(__file__).parents[1] / "RESULTS.md"
_QUICK_MODELS = ("gpt", "gpt_scan_remat")
_QUICK_VARIANTS = (HAND, "ours o1", "ours compute")

Programs = Mapping[str, Callable[[], Program]]


def run(chosen: argparse.Namespace) -> dict[str, dict[str, Row]]:
    """Runs a command; returns the rows by heading and name."""
    work = {"optimizer": _optimizers, "sharded": _sharded}.get(chosen.command, _models)
    everything = {}
    for target in chosen.targets:
        with _effort(chosen.level, target) as level:
            head = f"{target}{f' at {level}' if level else ''}, JAX {jax.__version__}"
            for name, programs, base_of in work(chosen, target):
                heading = f"{name}, {head}"
                everything[heading] = _rows(heading, programs, base_of, chosen)
    return everything


def run_batches(chosen: argparse.Namespace) -> list[list[str]]:
    """Finds the batches that fit; returns the cells of their table."""
    cells = batches.table(chosen.targets, lambda target: _effort(chosen.level, target))
    print("\n" + tables.as_text(cells), flush=True)
    if chosen.markdown:
        text = f"JAX {jax.__version__}, v5e at {chosen.level}:\n\n{tables.as_markdown(cells)}"
        tables.write_between_markers(RESULTS, "batches that fit", text)
    return cells


@contextlib.contextmanager
def _effort(level: str, target: str) -> Iterator[str | None]:
    """Sets the level of the TPU compiler; the GPU's has none, for it the setting stays."""
    if target not in TPUS:
        yield None
        return
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", level)
    try:
        yield level
    finally:
        jax.config.update("jax_optimization_level", before)


Work = Iterator[tuple[str, Programs, Callable[[str], str]]]


def _models(chosen: argparse.Namespace, target: str) -> Work:
    cases = with_sizes(QUICK_CASES if chosen.quick else CASES, layers=chosen.layers)
    names = chosen.models or (_QUICK_MODELS if chosen.quick else tuple(CASES))
    variants = chosen.variants or (_QUICK_VARIANTS if chosen.quick else DEFAULTS)
    dtype = jnp.dtype(chosen.dtype)
    device = devices(target)[0]
    for name in names:
        case = cases[name]
        if chosen.batch:
            case = dataclasses.replace(case, inputs=(chosen.batch, *case.inputs[1:]))

        def program(variant: str, case=case) -> Program:
            return training_program(case, LOSSES[variant](case, dtype), device)

        programs = {v: lambda v=v, program=program: program(v) for v in variants}
        yield f"{case}, {chosen.dtype}", programs, lambda _: HAND


def _optimizers(chosen: argparse.Namespace, target: str) -> Work:
    device = devices(target)[0]
    names = chosen.variants or tuple(optimizers.OPTIMIZERS)

    def program(name: str) -> Program:
        return optimizers.optimizer_program(
            name, device, quick=chosen.quick, unrolled=chosen.unrolled
        )

    count = sharding.parameters_of(program(optimizers.ADAMW)) / 1e6
    arrays = len(jax.tree.leaves(program(optimizers.ADAMW).arguments[0]))
    title = f"adamw step of {count:.0f}M parameters in {arrays} arrays"
    yield title, {n: lambda n=n: program(n) for n in names}, optimizers.base_of


def _sharded(chosen: argparse.Namespace, target: str) -> Work:
    size = "small" if chosen.quick else chosen.size
    length = 256 if chosen.quick else chosen.length
    variants = chosen.variants or (_QUICK_VARIANTS if chosen.quick else DEFAULTS)

    def program(variant: str) -> Program:
        dtype = jnp.dtype(chosen.dtype)
        return sharding.sharded_program(target, chosen.mesh, size, variant, dtype, length)

    count = sharding.parameters_of(program(variants[0])) / 1e9
    mesh = f"fsdp {chosen.mesh[0]}, tensor {chosen.mesh[1]}"
    title = f"GPT of {count:.2f}e9 parameters, length {length}, {mesh}, per chip, {chosen.dtype}"
    yield title, {v: lambda v=v: program(v) for v in variants}, lambda _: HAND


def _rows(
    heading: str, programs: Programs, base_of: Callable[[str], str], chosen: argparse.Namespace
) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    print(f"\n{heading}", flush=True)
    for name, make in programs.items():
        rows[name], text = measure(make())
        _keep(chosen.keep, heading, name, text, rows)
        print(f"{name}: {report.line(rows[name])}", flush=True)
    found = [report.table(rows, base_of)]
    if len(kinds := report.kinds(rows)) > 1:
        found.append(kinds)
    for table in found:
        print("\n" + tables.as_text(table), flush=True)
    if chosen.markdown:
        text = "\n\n".join(tables.as_markdown(table) for table in found)
        tables.write_between_markers(RESULTS, f"compilers {heading}", f"{heading}:\n\n{text}")
    return rows


def _keep(
    folder: pathlib.Path, heading: str, name: str, text: str, rows: Mapping[str, Row]
) -> None:
    """Writes the text of a program and all rows so far into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "".join(c if c.isalnum() else "_" for c in heading)[:180]
    own = "".join(c if c.isalnum() else "_" for c in name)
    (folder / f"{stem}.{own}.hlo.txt").write_text(text)
    content = {name: as_json(row) for name, row in rows.items()}
    (folder / f"{stem}.json").write_text(json.dumps(content, indent=1))
