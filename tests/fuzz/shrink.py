"""Smaller programs that fail in the same way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .program import NAME, Let, Program, jax_settings, pruned
from .properties import Case, Failure, check

SECONDS = 20.0


def smallest(case: Case, failure: Failure) -> tuple[Program, tuple[Any, ...]]:
    """Shrinks a failing program for a while.

    It keeps one output, replaces statements by inputs that hold their values, and replaces
    statements, inside functions as well, by other values of the same type.

    Args:
        case: The case that fails.
        failure: How it fails.

    Returns:
        The program and its arguments.
    """
    program, args = case.program, case.args
    stop = time.process_time() + SECONDS
    progress = True
    while progress and time.process_time() < stop:
        progress = False
        for smaller, its_args in _candidates(program, args):
            if time.process_time() > stop:
                break
            try:
                trial = Case(smaller, case.setting, its_args, np.random.default_rng(0))
                failures, _ = check(trial, (failure.property,))
            except Exception:  # no program any more
                continue
            if any(_alike(f, failure) for f in failures):
                program, args, progress = smaller, its_args, True
                break
    return program, args


def _alike(first: Failure, second: Failure) -> bool:
    """Of one property, and of one kind: the same exception, or a promise that does not hold."""
    kinds = [f.message.split(":")[0].split(",")[0] for f in (first, second)]
    return first.property == second.property and kinds[0] == kinds[1]


def _candidates(program: Program, args: Any) -> Iterator[tuple[Program, tuple[Any, ...]]]:
    for i in range(len(program.outputs)):
        if len(program.outputs) > 1:
            kept = program.outputs[:i] + program.outputs[i + 1 :]
            yield pruned(dataclasses.replace(program, outputs=kept)), args
    for i in reversed(range(len(program.body))):
        yield from _as_inputs(program, args, i)
    for body in _shorter(program.body, dict(program.types)):
        yield pruned(dataclasses.replace(program, body=body)), args
    yield from _without_inputs(program, args)


def _as_inputs(program: Program, args: Any, i: int) -> Iterator[tuple[Program, tuple[Any, ...]]]:
    """The values of a statement become data."""
    let = program.body[i]
    if any(t.dtype == "key" for t in let.types):
        return
    outputs = dataclasses.replace(program, body=program.body[: i + 1], outputs=let.names)
    try:
        with jax_settings(program.x64):
            found = jax.jit(outputs.function())(*args)
    except Exception:  # it does not run up to here
        return
    yield (
        pruned(
            dataclasses.replace(
                program,
                data=program.data + let.names,
                types={**program.types, **dict(zip(let.names, let.types, strict=True))},
                body=program.body[:i] + program.body[i + 1 :],
            )
        ),
        (*args, *found),
    )


def _without_inputs(program: Program, args: Any) -> Iterator[tuple[Program, tuple[Any, ...]]]:
    used = {name for let in program.body for name in let.reads()} | set(program.outputs)
    data = [(n, x) for n, x in zip(program.data, args[1:], strict=True) if n in used]
    params = tuple(name for name in program.params if name in used)
    if len(data) == len(program.data) and len(params) == len(program.params):
        return
    yield (
        dataclasses.replace(program, data=tuple(n for n, _ in data), params=params),
        ({n: args[0][n] for n in params}, *(x for _, x in data)),
    )


def _shorter(body: tuple[Let, ...], types: dict[str, Any]) -> Iterator[tuple[Let, ...]]:
    """Bodies in which one statement is another value of its type."""
    types = dict(types)
    for i, let in enumerate(body):
        trivial = NAME.fullmatch(let.expr) is not None
        if len(let.names) == 1 and not trivial:
            for name, t in types.items():
                if t == let.types[0]:
                    short = Let(let.names, let.types, name)
                    yield (*body[:i], short, *body[i + 1 :])
        for k, d in enumerate(let.defs):
            # A derivative rule may not read what is around it.
            for inner in _shorter(d.body, dict(zip(d.params, d.types, strict=True))):
                defs = (*let.defs[:k], dataclasses.replace(d, body=inner), *let.defs[k + 1 :])
                yield (*body[:i], dataclasses.replace(let, defs=defs), *body[i + 1 :])
        types.update(zip(let.names, let.types, strict=True))
