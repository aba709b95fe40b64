"""One function per primitive that holds jaxprs: emits it around its rewritten inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..policies import CALLS
from .compat import (
    bind,
    call_with_operands,
    consts_of,
    inner_jaxpr_key,
    mark_frames,
    open_jaxpr,
    scan_split,
    scan_with_consts,
    shard_map_axes,
)
from .emit import cast
from .plan import EquationPlan
from .rewrite import Rewriter, read, rewrites

mark_frames(__file__)


def _copies(
    plan: EquationPlan, operands: list[Any], first: int = 0, count: int | None = None
) -> tuple[list[Any], list[tuple[int, np.dtype]]]:
    """The 16-bit copies that the inside takes as operands, and what each is a copy of.

    Args:
        plan: The equation's plan.
        operands: Its operands.
        first: The operand that is the inside's input 0.
        count: How many operands are inputs of that inside, None for all.
    """
    end = len(operands) if count is None else first + count
    order = [(i, d) for i, d in plan.low_copies if first <= i < end]
    return [operands[i].copy(d) for i, d in order], [(i - first, d) for i, d in order]


@rewrites("convert_element_type")
def _convert_element_type(
    rewriter: Rewriter, eqn: Any, plan: EquationPlan, operands: list[Any]
) -> list[Any]:
    (x,), dtype = read(plan, operands), plan.results[0].dtype
    target = eqn.params["new_dtype"] if dtype is None else dtype
    return [x if x.dtype == target else cast(x, target)]


@rewrites(*(CALLS - {"remat_opt"}))
def _call(rewriter: Rewriter, eqn: Any, plan: EquationPlan, operands: list[Any]) -> list[Any]:
    key, inner = inner_jaxpr_key(eqn.params), plan.inner[0]
    copies, order = _copies(plan, operands)
    jaxpr = rewriter.jaxpr(inner, eqn.params[key], order, at=len(operands))
    is_open = eqn.primitive.name in ("remat2", "checkpoint")
    params = call_with_operands(eqn.params, [i for i, _ in order])
    params = {**params, key: open_jaxpr(jaxpr) if is_open else jaxpr}
    return bind(eqn.primitive, [*read(plan, operands), *copies], params)


@rewrites("remat_opt")
def _remat_opt(rewriter: Rewriter, eqn: Any, plan: EquationPlan, operands: list[Any]) -> list[Any]:
    # The forward rule of a custom_vjp with optimize_remat, inlined: the equation can also recompute
    # the function without its residuals, in dtypes that would no longer be those planned.
    closed = eqn.params[inner_jaxpr_key(eqn.params)]
    return rewriter.evaluate(plan.inner[0], consts_of(closed), read(plan, operands))


@rewrites("scan")
def _scan(rewriter: Rewriter, eqn: Any, plan: EquationPlan, operands: list[Any]) -> list[Any]:
    consts, _ = scan_split(eqn.params)
    copies, order = _copies(plan, operands)
    jaxpr = rewriter.jaxpr(plan.inner[0], eqn.params["jaxpr"], order, at=consts)
    args = read(plan, operands)
    params = scan_with_consts({**eqn.params, "jaxpr": jaxpr}, len(copies))
    return eqn.primitive.bind(*args[:consts], *copies, *args[consts:], **params)


@rewrites("while")
def _while(rewriter: Rewriter, eqn: Any, plan: EquationPlan, operands: list[Any]) -> list[Any]:
    args = read(plan, operands)
    params, bound, first = dict(eqn.params), [], 0
    for inner, part in zip(plan.inner, ("cond", "body"), strict=True):
        count = params[f"{part}_nconsts"]
        copies, order = _copies(plan, operands, first, count)
        jaxpr = rewriter.jaxpr(inner, params[f"{part}_jaxpr"], order, at=count)
        params |= {f"{part}_jaxpr": jaxpr, f"{part}_nconsts": count + len(copies)}
        bound += [*args[first : first + count], *copies]
        first += count
    return eqn.primitive.bind(*bound, *args[first:], **params)


@rewrites("cond")
def _cond(rewriter: Rewriter, eqn: Any, plan: EquationPlan, operands: list[Any]) -> list[Any]:
    copies, order = _copies(plan, operands, first=1)
    branches = tuple(
        rewriter.jaxpr(inner, branch, order, at=len(operands) - 1)
        for inner, branch in zip(plan.inner, eqn.params["branches"], strict=True)
    )
    params = {**eqn.params, "branches": branches}
    return eqn.primitive.bind(*read(plan, operands), *copies, **params)


@rewrites("shard_map")
def _shard_map(
    rewriter: Rewriter, eqn: Any, plan: EquationPlan, operands: list[Any]
) -> Sequence[Any]:
    inner, params = plan.inner[0], eqn.params

    def body(*xs: Any) -> tuple[Any, ...]:
        return tuple(rewriter.evaluate(inner, consts_of(params["jaxpr"]), xs))

    # The public function sets up the mesh axes for the trace of the body.
    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=shard_map_axes(params),
    )
    return list(mapped(*read(plan, operands)))
