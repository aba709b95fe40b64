"""Emits higher-order primitives around their rewritten bodies.

One rule serves all primitives that `structure.py` can bind with other jaxprs. Each other primitive
has its own rule: here, or in `derivative_rules.py` for functions with a derivative or batching rule
of the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from ..after.copies import handed_in
from ..compat import JaxprEqn, bound, consts_of, mark_frames
from ..plan.data import EquationPlan
from ..primitives.structure import STRUCTURES, Copy, bodies, rebound, shard_map_options
from .rewriter import Rewriter, rewrites
from .rewritten_bodies import rewritten_bodies
from .values import read

mark_frames(__file__)


@rewrites(*(name for name, structure in STRUCTURES.items() if structure.rebind is not None))
def rebind_bodies(
    rewriter: Rewriter, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]
) -> Sequence[Any]:
    """Binds an equation with rewritten bodies, which take 16-bit copies as additional operands.

    Args:
        rewriter: Rewrites the bodies.
        eqn: The equation.
        plan: Its plan.
        operands: Its operands, each a `Value` or `Scalar`.

    Returns:
        The results, as arrays.
    """
    arrays = read(plan, operands)
    made = rewritten_bodies(rewriter, eqn, plan, arrays)
    # The copies are made before the equation, in its scopes: once for all iterations of a loop.
    copies = [
        [Copy(body.operands[i], operands[body.operands[i]].copy(key)) for i, key in pairs]
        for body, (_, pairs) in zip(bodies(eqn), made, strict=True)
    ]
    args, params = rebound(eqn, arrays, [jaxpr for jaxpr, _ in made], copies)
    return bound(eqn.replace(params=params), args)


@rewrites("remat_opt")
def _remat_opt(
    rewriter: Rewriter, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]
) -> Sequence[Any]:
    """Inlines the forward rule of a `custom_vjp` with `optimize_remat`.

    The equation can also compute the function without its residuals, but not in the planned dtypes.
    """
    (body,) = bodies(eqn)
    # The body gets no jaxpr of its own, so that JAX keeps the residuals of its equations.
    return rewriter.evaluate(plan.inner[0], consts_of(body.jaxpr), read(plan, operands))


@rewrites("shard_map")
def _shard_map(
    rewriter: Rewriter, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]
) -> Sequence[Any]:
    """Emits a map by `jax.shard_map`, which sets up the mesh axes for the trace of the body."""
    (body,), arrays = bodies(eqn), read(plan, operands)
    copied = handed_in(eqn, plan, rewriter.known_copies)
    # The operands are cast to 16 bits before the map. Without a barrier, XLA would give the casts
    # the sharding inside of the map, and transfer float32 between devices.
    held = lax.optimization_barrier
    arrays = [x if d is None else held(x) for x, d in zip(arrays, plan.operands, strict=True)]
    copies = [held(operands[i].copy(key)) for i, key in copied]

    def mapped(*xs: Any) -> tuple[Any, ...]:
        args, more = xs[: len(arrays)], dict(zip(copied, xs[len(arrays) :], strict=True))
        return tuple(rewriter.evaluate(plan.inner[0], consts_of(body.jaxpr), args, more))

    options = shard_map_options(eqn, [i for i, _ in copied])
    return list(jax.shard_map(mapped, **options)(*arrays, *copies))
