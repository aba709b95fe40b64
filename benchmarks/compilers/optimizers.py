"""One optimizer step on gradients that are there already, with each way to skip a bad one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from comparison.skipping import OURS, WAYS, Optimizer, with_optax, with_ours

from .programs import CASES, QUICK_CASES, Program, on_device, shapes_of


def adamw() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


def clipped() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), adamw())


ADAMW, CLIPPED = "adamw", "clip + adamw"
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    ADAMW: lambda: with_optax(adamw()),
    **{f"{name} (adamw)": lambda way=way: way(adamw()) for name, way in WAYS.items()},
    CLIPPED: lambda: with_optax(clipped()),
    f"{OURS} ({CLIPPED})": lambda: with_ours(clipped()),
}
"""The rows, in order. Those that name clip are compared with `CLIPPED`, the others with `ADAMW`."""


def base_of(name: str) -> str:
    """Returns the row that another one's ratios are to."""
    return CLIPPED if CLIPPED in name else ADAMW


def optimizer_program(name: str, device: Any, *, quick: bool, unrolled: bool) -> Program:
    """Returns an optimizer step on the parameters of a GPT, 124M of them, or 2M.

    Args:
        name: One of `OPTIMIZERS`.
        device: Where it runs.
        quick: Whether the parameters are those of the small GPT.
        unrolled: Whether each layer has its own arrays: 148 arrays and not 16.
    """
    case = (QUICK_CASES if quick else CASES)["gpt_scan_remat"]
    if unrolled:
        case = dataclasses.replace(case, sizes={**case.sizes, "scan": False})
    params, _ = shapes_of(case)
    init, step = OPTIMIZERS[name]()
    arguments = (params, jax.eval_shape(init, params), params)
    return Program(step, on_device(arguments, device))
