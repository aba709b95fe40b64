"""A program as PyTorch's autocast would round it, and as a careful author would by hand.

The oracle of `dangers`: what one of them gets right, `autocast` has to get as right. A jaxpr is run
equation by equation in the dtypes that a short rule gives, with none of the planner's code.

* Products read the compute dtype and return it; exponentials, sums and the like read float32.
* What is left reads the widest of its operands. In PyTorch's way every float32 array with a
  dimension counts; by hand a parameter or constant is cast to the dtype of what it meets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_autocast.interpreters.compat import Literal, bind, body_of, consts_of, scan_split
from jmp_autocast.interpreters.primitives.reading import redispatched, with_preferred_dtype

from .error_model import CALLS
from .facts import CONTRACTIONS, ELEMENTWISE_FULL, SUMS

# Written here, and not read from the planner's table: a wrong row there cannot hide itself.
_RARER = """
    bessel_i0e bessel_i1e cholesky_update eig geqp3 hessenberg igamma igamma_grad_a igammac log2
    one_minus_square ormqr polygamma polynomial random_gamma reduce_window_sum
    regularized_incomplete_beta schur symmetric_product tridiagonal tridiagonal_solve zeta
"""
FULL = ELEMENTWISE_FULL | SUMS | frozenset(_RARER.split())


class Rounded:
    """Runs jaxprs by PyTorch's rule where ``leaves_vote``, else as cast by hand."""

    def __init__(self, low: Any, leaves_vote: bool) -> None:
        self.low = jnp.dtype(low)
        self.leaves_vote = leaves_vote

    def run(self, closed: Any, args: Sequence[Any], leaf: Sequence[bool]) -> list[Any]:
        """Runs a jaxpr; ``leaf`` says which arguments are parameters."""
        body = body_of(closed)
        env = dict(zip(body.constvars, consts_of(closed), strict=True))
        env.update(zip(body.invars, args, strict=True))
        leaves = {
            *body.constvars,
            *(v for v, is_leaf in zip(body.invars, leaf, strict=True) if is_leaf),
        }
        read = lambda v: jnp.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]
        for eqn in body.eqns:
            is_leaf = [isinstance(v, Literal) or v in leaves for v in eqn.invars]
            xs = [read(v) for v in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, xs, is_leaf), strict=True))
            if eqn.invars and all(is_leaf):
                leaves.update(eqn.outvars)
        return [read(v) for v in body.outvars]

    def _equation(self, eqn: Any, xs: list[Any], leaf: list[bool]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            inner = next(params[k] for k in ("jaxpr", "call_jaxpr") if k in params)
            return self.run(inner, xs, leaf)
        if name == "scan":
            return self._scan(params, xs, leaf)
        floats = [i for i, x in enumerate(xs) if x.dtype in (jnp.float32, self.low)]
        target = self._target(eqn, xs, leaf, floats)
        if target is not None and name != "convert_element_type":
            xs = [x.astype(target) if i in floats else x for i, x in enumerate(xs)]
        if name.startswith("scatter"):
            return [redispatched(eqn, *xs)]
        if name in CONTRACTIONS:
            params = {**params, **with_preferred_dtype(xs[0].dtype)}
        out = bind(eqn.primitive, xs, params)
        return out if eqn.primitive.multiple_results else [out]

    def _target(self, eqn: Any, xs: list[Any], leaf: list[bool], floats: list[int]) -> Any:
        name = eqn.primitive.name
        if not floats:
            return None
        if name in CONTRACTIONS:
            return self.low
        if name in FULL:
            return jnp.float32
        voters = [
            i
            for i in floats
            if (xs[i].ndim if self.leaves_vote else not leaf[i]) and not _is_literal(eqn.invars[i])
        ]
        return np.result_type(*(xs[i].dtype for i in voters or floats))

    def _scan(self, params: Any, xs: list[Any], leaf: list[bool]) -> list[Any]:
        consts, carries = scan_split(params)
        first, carry, rows = xs[:consts], xs[consts : consts + carries], xs[consts + carries :]
        known = [*leaf[:consts], *(False,) * (len(xs) - consts)]
        outs = []
        steps = range(params["length"])
        for i in reversed(steps) if params["reverse"] else steps:
            out = self.run(params["jaxpr"], [*first, *carry, *(x[i] for x in rows)], known)
            carry = [x.astype(c.dtype) for x, c in zip(out, carry, strict=False)]
            outs.append(out[carries:])
        outs = outs[::-1] if params["reverse"] else outs
        return [*carry, *(jnp.stack([o[k] for o in outs]) for k in range(len(outs[0])))]


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def errors(exact: Sequence[Any], found: Sequence[Any]) -> list[float]:
    """Returns how far each result is from the exact one, relative to the largest element of that.

    Integers count as the share of those that are wrong; what is not finite is infinitely far.
    """

    def error(e: Any, f: Any) -> float:
        e, f = (np.asarray(x).astype(np.float64) for x in (e, f))
        finite = np.isfinite(e)
        if not np.isfinite(f[finite]).all():
            return np.inf
        away = np.abs(np.where(finite, f, 0) - np.where(finite, e, 0))
        scale = np.abs(np.where(finite, e, 0)).max(initial=0)
        return float(away.max(initial=0) / (scale or 1))

    def wrong(e: Any, f: Any) -> float:
        return float(np.mean(np.asarray(e) != np.asarray(f)))

    return [
        (error if jnp.issubdtype(e.dtype, jnp.inexact) else wrong)(e, f)
        for e, f in zip(exact, found, strict=True)
    ]
