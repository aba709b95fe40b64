"""How far from float32 a result may be: the program again, with each rounding made at random.

The model is Monte Carlo arithmetic. The plain jaxpr is evaluated in float32 many times, and each
time every value that a 16-bit dtype might hold is rounded to a grid four times as coarse as that
dtype's, at an offset drawn anew. The spread of the results around the exact ones says how the
program enlarges roundings; twice the spread (and some float32 roundings) is allowed. Where a
sample decides a comparison, an order or a branch the other way, so may the program.

* What may be 16 bits: operands and results of every equation but those that are promised in
  float32 (`facts`): exponentials, logarithms, sums, linear algebra, what has a literal that the
  dtype has no value for, products of coordinates, and elementwise operations on results of these.
  With ``level="tensor_cores"`` contractions and data movement alone.
* float16 has a range as well: what exceeds it becomes inf in the samples, and a result that
  depends on it may be anything. Small values get the absolute error of a subnormal.
* In gradients sums may be 16 bits: JAX transposes a broadcast of a 16-bit value to one.
* Values of the program's own 16-bit dtypes are rounded at random as well: it is up to the compiler
  when it rounds. Other dtypes carry the errors of what they are made of.

A program that is chaotic bounds itself: its samples lie far apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast.interpreters.compat import (
    Literal,
    body_of,
    consts_of,
    inner_jaxpr_key,
    scan_split,
)

from .facts import (
    CONTRACTIONS,
    ELEMENTWISE_FULL,
    MOVEMENT,
    NOTHING,
    PASSING,
    SUMS,
    Fact,
    fact_of,
    guarded,
    literal_fact,
    reads_coordinates,
)
from .numpy_rules import apply, to_numpy

# Along the one device of a mesh axis.
IDENTITIES = frozenset(
    """
    psum psum_invariant pmax pmin pvary pbroadcast all_gather_invariant reduced_vary_cast
    vary_unreduced_cast
    """.split()
)
CALLS = frozenset(
    """
    jit pjit closed_call core_call remat2 checkpoint remat custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr custom_vmap_call eval_jaxpr shard_map
    """.split()
)
COMPARISONS = frozenset("eq ne lt le gt ge".split())
EQUALITIES = COMPARISONS | {"max", "min"}
FLOATS = ("float32", "float16", "bfloat16")
FULL_BITS = 21


@dataclasses.dataclass(frozen=True)
class Precision:
    """What the roundings are like: in the compute dtype, and those of scopes in the program."""

    dtypes: frozenset[str]
    level: str = "o1"
    gradients: bool = False

    def may_be_low(self, primitive: str) -> bool:
        if primitive in ELEMENTWISE_FULL:
            return False
        if primitive in SUMS:
            return self.gradients
        if self.level == "tensor_cores" and not self.gradients:
            return primitive in CONTRACTIONS or primitive in MOVEMENT
        return True


def _bits(dtypes: frozenset[str]) -> tuple[int, bool]:
    return (5 if "bfloat16" in dtypes else 8), "float16" in dtypes


def _rounded(
    x: Any, rng: np.random.Generator, bits: int, narrow: bool, offset: float | None
) -> Any:
    """``x`` rounded to a grid of ``bits`` bits of mantissa, at a random offset by default."""
    scale = np.float32(0.5 + 0.5 * (rng.random() if offset is None else offset))
    full = np.asarray(x).astype(np.float32)
    with np.errstate(all="ignore"):
        mantissa, exponent = np.frexp(full * scale)
        grid = np.float32(2 ** (bits + 1))
        y = np.ldexp(np.rint(mantissa * grid) / grid, exponent) / scale
        if narrow:
            y = _to_subnormals(y, rng, 2.0**-23, 2.0**-12)
            y = _to_infinity(y, rng)
        elif bits < 8:  # bfloat16
            y = _to_subnormals(y, rng, 2.0**-132, 2.0**-126)
        if not narrow:  # neither dtype makes the largest float32 numbers infinite
            y = np.where(np.isfinite(y), y, full)
        return y.astype(x.dtype)


def _to_subnormals(y: Any, rng: np.random.Generator, least: float, below: float) -> Any:
    """Small values, rounded up or down to multiples of twice the dtype's least number.

    Each element by itself: what is left of the smallest is a matter of chance. What is 0 stays it.
    """
    size = np.abs(y)
    small = (size < below) & (size > 0)
    if not np.any(small):
        return y
    steps = np.rint(y / np.float32(least) + rng.random(y.shape, np.float32) - np.float32(0.5))
    return np.where(small, steps * np.float32(least), y)


def _to_infinity(y: Any, rng: np.random.Generator) -> Any:
    size = np.abs(y)
    large = size > 62000.0
    if not np.any(large):
        return y
    large &= rng.random(y.shape) < np.where(size < 66000.0, 0.5, 1.0)
    return np.where(large, np.copysign(np.float32(np.inf), y), y)


class Evaluation:
    """Evaluates a jaxpr with random roundings, without an ``rng`` exactly."""

    def __init__(self, precision: Precision, rng: np.random.Generator | None) -> None:
        self.precision = precision
        self.rng = rng
        # What may be 16 bits need not be. An accumulator that is float32 may hold what exceeds
        # float16 while operands do not.
        self.narrow = self.narrow_factors = 1.0
        if rng is not None:
            self.narrow, self.narrow_factors = rng.choice((0.0, 0.5, 1.0, 1.0), 2)

    def noisy(self, x: Any, low: bool, share: float, offset: float | None = None) -> Any:
        dtype = getattr(getattr(x, "dtype", None), "name", "")
        if self.rng is None or not isinstance(x, np.ndarray) or dtype not in FLOATS:
            return x
        if dtype != "float32":
            bits, narrow = _bits(frozenset((dtype,)) | (self.precision.dtypes if low else set()))
        else:
            bits, narrow = _bits(self.precision.dtypes) if low else (FULL_BITS, False)
        narrow = narrow and (dtype == "float16" or self.rng.random() < share)
        return _rounded(x, self.rng, bits, narrow, offset)

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Runs an open or closed jaxpr."""
        return self._call(jaxpr, args, [NOTHING] * len(args))[0]

    def _call(
        self, jaxpr: Any, args: Sequence[Any], given: Sequence[Fact]
    ) -> tuple[list[Any], list[Fact]]:
        body = body_of(jaxpr)
        env: dict[Any, Any] = dict(
            zip(body.constvars, map(to_numpy, consts_of(jaxpr)), strict=False)
        )
        env.update(zip(body.invars, map(to_numpy, args), strict=True))
        facts = {v: fact for v, fact in zip(body.invars, given, strict=True) if fact != NOTHING}

        def read(atom: Any) -> Any:
            return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]

        def fact(atom: Any) -> Fact:
            if isinstance(atom, Literal):
                return literal_fact(atom.val)
            return facts.get(atom, NOTHING)

        for eqn in body.eqns:
            xs = [read(v) for v in eqn.invars]
            results, known = self.equation(eqn, xs, [fact(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
            facts.update((v, f) for v, f in zip(eqn.outvars, known, strict=False) if f != NOTHING)
        return [read(v) for v in body.outvars], [fact(v) for v in body.outvars]

    def equation(
        self, eqn: Any, xs: list[Any], facts: Sequence[Fact]
    ) -> tuple[list[Any], Sequence[Fact]]:
        """Returns the results of an equation, and what is promised of the first one."""
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            key = "call" if name == "custom_vmap_call" else inner_jaxpr_key(params)
            return self._call(params[key], xs, facts)
        if name in IDENTITIES:
            return xs, ()
        if name == "axis_index":
            return [np.int32(0)], ()
        if name == "scan":
            return self.scan(params, xs), ()
        if name == "while":
            return self.while_loop(params, xs), ()
        if name == "cond":
            branches = params["branches"]
            index = min(max(int(xs[0]), 0), len(branches) - 1)
            return self._call(branches[index], xs[1:], facts[1:])[0], ()
        if self.rng is None:
            return self._apply(eqn, xs), ()
        kept = guarded(eqn, facts, self.precision.dtypes)
        if not self.precision.gradients:
            kept = kept or reads_coordinates(eqn, xs, facts)
        promised = fact_of(eqn, facts, kept)
        if self.precision.gradients:
            promised = Fact(promised.known, promised.literal)
        if promised.known is not None and name in PASSING:
            return self._apply(eqn, xs), (promised,)
        exact = kept or promised.full or promised.coordinates
        low = self.precision.may_be_low(name) and not exact
        # On one grid, values that are close are equal: also float32 ones that were 16 bits before.
        is_on_grid = name in EQUALITIES if low else name in COMPARISONS and not exact
        equal = self.rng.random() if is_on_grid and self.rng.random() < 0.5 else None
        if (low and name != "convert_element_type") or equal is not None:
            share = self.narrow_factors if name in CONTRACTIONS else self.narrow
            pairs = zip(eqn.invars, xs, strict=True)
            seen = {id(v): self.noisy(x, True, share, equal) for v, x in pairs}
            xs = [seen[id(v)] for v in eqn.invars]
        return [self.noisy(x, low, self.narrow) for x in self._apply(eqn, xs)], (promised,)

    def _apply(self, eqn: Any, xs: list[Any]) -> list[Any]:
        if eqn.primitive.name != "custom_linear_solve":
            return apply(eqn, xs)
        # Its functions may hold what has a kernel in `jax.shard_map` alone.
        counts, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        first = counts.matvec + counts.vecmat
        operands = xs[first : first + counts.solve] + xs[sum(counts) :]
        return Evaluation(self.precision, None).run(solve, operands)

    def scan(self, params: dict[str, Any], xs: list[Any]) -> list[Any]:
        consts, carries = scan_split(params)
        first, carry, rows = xs[:consts], xs[consts : consts + carries], xs[consts + carries :]
        outs: list[list[Any]] = []
        steps = range(params["length"])
        for i in reversed(steps) if params["reverse"] else steps:
            out = self.run(params["jaxpr"], [*first, *carry, *(x[i] for x in rows)])
            carry = out[:carries]
            outs.append(out[carries:])
        if params["reverse"]:
            outs.reverse()
        avals = body_of(params["jaxpr"]).outvars[carries:]
        return [*carry, *(_stacked([o[k] for o in outs], v.aval) for k, v in enumerate(avals))]

    def while_loop(self, params: dict[str, Any], xs: list[Any]) -> list[Any]:
        n, m = params["cond_nconsts"], params["body_nconsts"]
        first, second, carry = xs[:n], xs[n : n + m], xs[n + m :]
        while np.any(going := np.asarray(self.run(params["cond_jaxpr"], [*first, *carry])[0])):
            new = self.run(params["body_jaxpr"], [*second, *carry])
            # In a batch each row stops by itself.
            carry = new if going.ndim == 0 else list(map(_chosen(going), new, carry))
        return list(carry)


def _chosen(rows: np.ndarray) -> Callable[[Any, Any], Any]:
    def choose(new: Any, old: Any) -> Any:
        where = np.where if isinstance(new, np.ndarray) else jnp.where  # of keys
        return where(rows.reshape(rows.shape + (1,) * (new.ndim - rows.ndim)), new, old)

    return choose


def _stacked(rows: list[Any], aval: Any) -> Any:
    if not rows:
        return np.zeros((0, *aval.shape), aval.dtype)
    if isinstance(rows[0], jax.Array):
        return jnp.stack(rows)
    return np.stack(rows)
