"""One program of a campaign: drawn, given arguments and a setting, and checked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import Policy

# Importing the operations registers them.
from . import (  # noqa: F401
    operations_arrays,
    operations_control,
    operations_numbers,
    operations_probes,
)
from .generator import generate
from .program import HEADER, ArrayType, Program, pruned
from .properties import PROPERTIES, SHARES, Case, Failure, Setting, check


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one program."""

    seed: int
    index: int
    properties: tuple[str, ...]
    without: tuple[str, ...]
    failures: tuple[Failure, ...]
    seconds: float
    report: str = ""


def draw_setting(rng: np.random.Generator) -> Setting:
    policy = Policy(
        ("bfloat16", "float16")[int(rng.integers(2))],
        level=str(rng.choice(("tensor_cores", "o1", "o1", "compute", "by_hand"))),
    )
    return Setting(policy, "none" if rng.random() < 0.2 else "auto")


def draw_array(t: ArrayType, rng: np.random.Generator) -> Any:
    """An array of a type: mostly normal, now and then with zeros, edges, inf and NaN."""
    if t.dtype == "key":
        return jax.random.key(int(rng.integers(1000)))
    dtype = jnp.dtype(t.dtype)
    if dtype.kind == "b":
        return jax.device_put(np.asarray(rng.random(t.shape) < 0.5))
    if dtype.kind in "iu":
        low = 0 if dtype.kind == "u" else -3
        return jax.device_put(np.asarray(rng.integers(low, 5, t.shape), dtype))
    x = rng.normal(size=t.shape)
    if dtype.kind == "c":
        return jax.device_put(np.asarray(x + 1j * rng.normal(size=t.shape), dtype))
    if rng.random() < 0.2:
        x = x * 10.0 ** rng.integers(-4, 4)
    if rng.random() < 0.15:
        edges = [0.0, 1.0, -1.0, 0.5, 2049.0, 65504.0, 1e-7]
        if rng.random() < 0.2:
            edges += [np.inf, -np.inf, np.nan, 3e38]
        x = np.where(rng.random(t.shape) < 0.3, rng.choice(edges, t.shape), x)
    with np.errstate(over="ignore"):
        x = np.asarray(x).astype(dtype)
    return jnp.asarray(float(x)) if t.weak else jax.device_put(x)


def draw_arguments(program: Program, rng: np.random.Generator) -> tuple[Any, ...]:
    with jax.enable_x64(program.x64):
        params = {name: draw_array(program.types[name], rng) for name in program.params}
        return (params, *(draw_array(program.types[name], rng) for name in program.data))


def draw_properties(
    program: Program, rng: np.random.Generator, shares: Mapping[str, float]
) -> tuple[str, ...]:
    if shares.get("values") and all(let.family == "probes" for let in program.body):
        shares = {**shares, "values": 1.0}  # they are made for it
    return tuple(name for name in PROPERTIES if rng.random() < shares.get(name, 0))


def reproduction(program: Program, seed: int, index: int) -> str:
    """The source text of a program, and how to make its arguments and its setting again."""
    return f"{HEADER}{program.text()}\n# tests.fuzz.campaign.make_case({seed}, {index})"


def make_case(
    seed: int, index: int, size: tuple[int, int] = (3, 9)
) -> tuple[Case, np.random.Generator]:
    """Program number ``index`` of a campaign; equal numbers give equal cases."""
    program = generate((seed, index), size)
    rng = np.random.default_rng((seed, index, 1))
    setting = draw_setting(rng)
    args = draw_arguments(program, rng)
    return Case(program, setting, args, rng), rng


def smallest(case: Case, failure: Failure) -> Program:
    """What one output of a failing program needs, if that alone fails as well."""
    for name in case.program.outputs:
        program = pruned(dataclasses.replace(case.program, outputs=(name,)))
        alone = Case(program, case.setting, case.args, np.random.default_rng(0))
        if check(alone, (failure.property,))[0]:
            return program
    return case.program


def run(seed: int, index: int, shares: Mapping[str, float] = SHARES) -> Outcome:
    """Draws and checks one program; ``shares`` are the probabilities of the properties."""
    start = time.process_time()
    case, rng = make_case(seed, index)
    names = draw_properties(case.program, rng, shares)
    failures, without = check(case, names)
    report = ""
    if failures:
        report = reproduction(smallest(case, failures[0]), seed, index)
    return Outcome(
        seed,
        index,
        names,
        tuple(without),
        tuple(failures),
        time.process_time() - start,
        report,
    )


def run_chunk(seed: int, shares: Mapping[str, float], first: int, count: int) -> list[Outcome]:
    """Runs some programs, and now and then forgets what JAX compiled for them."""
    outcomes = [run(seed, i, shares) for i in range(first, first + count)]
    if first % (40 * count) == 0:
        jax.clear_caches()
    return outcomes
