"""Comparing found values with the samples of the error model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast.interpreters.compat import jaxpr_as_fun

from .error_model import Evaluation, Precision

# More samples allow more: most results are close enough to the first ones.
SAMPLES = (3, 12, 300)

# A program runs a few times: compiling quickly is worth more. Without excess precision every
# 16-bit value is rounded, as the jaxpr says.
_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_allow_excess_precision": False,
}


def compile_quickly(traced: Any) -> Callable[..., Any]:
    return traced.lower().compile(compiler_options=_OPTIONS)


def run_as_traced(traced: Any, args: Any) -> list[Any]:
    """What XLA makes of a traced function if it folds no constants, which it does exactly."""
    consts, leaves = list(traced.jaxpr.consts), jax.tree.leaves(args)
    program = jax.jit(lambda consts, xs: jaxpr_as_fun(traced.jaxpr.replace(consts=consts))(*xs))
    return compile_quickly(program.trace(consts, leaves))(consts, leaves)


def interpreted(traced: Any, args: Any) -> list[Any]:
    """Evaluates a traced function equation by equation, as its jaxpr says."""
    return Evaluation(Precision(frozenset()), None).run(traced.jaxpr, jax.tree.leaves(args))


def as_numbers(x: Any) -> np.ndarray:
    """An array that NumPy can subtract: keys as their data, 8 and 16-bit floats as float32."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if x.dtype.kind == "b":
        return x.astype(np.int8)
    if x.dtype.kind == "V" or (x.dtype.itemsize < 4 and x.dtype.kind not in "iu"):
        return x.astype(np.float32)
    return x


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


class Unsupported(Exception):
    """The plain program has no such thing: a derivative, a batched form, a kernel."""


class Bound:
    """What the results of the plain program may be with some roundings."""

    def __init__(self, closed: Any, precision: Precision) -> None:
        self.closed = closed
        self.precision = precision

    def _sample(self, rng: Any, leaves: Sequence[Any]) -> list[np.ndarray]:
        return [
            _wide(as_numbers(x)) for x in Evaluation(self.precision, rng).run(self.closed, leaves)
        ]

    def _leaves(self, args: Any) -> list[Any]:
        return [
            x.astype(aval.dtype) if not hasattr(x, "dtype") else x
            for x, aval in zip(jax.tree.leaves(args), self.closed.in_avals, strict=True)
        ]

    def exact(self, args: Any) -> list[np.ndarray]:
        """Returns the values of the plain program.

        Raises:
            Unsupported: It does not run.
        """
        try:
            return self._sample(None, self._leaves(args))
        except (NotImplementedError, TypeError) as error:
            # No kernel in the program's own dtypes, or jvp of a custom_vjp function.
            if isinstance(error, TypeError) and "forward-mode" not in str(error):
                raise
            raise Unsupported(f"the plain program does not run: {error}") from error

    def check(self, found: Any, args: Any, rng: Any) -> tuple[str, list[float]]:
        """Returns what is wrong, and of each float result the median of the allowed error."""
        leaves, exact = self._leaves(args), self.exact(args)
        found = [_wide(as_numbers(x)) for x in jax.tree.leaves(found)]
        spread = [np.zeros(x.shape) for x in exact]
        count = 0
        for wanted in SAMPLES:
            while count < wanted:
                count += 1
                for s, e, y in zip(spread, exact, self._sample(rng, leaves), strict=True):
                    with np.errstate(all="ignore"):
                        away = np.where(_same(y, e), 0.0, np.abs(y - e))
                    np.maximum(s, np.where(np.isnan(away), np.inf, away), out=s)
            messages, medians = _compare(found, exact, spread, self.closed.out_avals)
            if not messages:
                return "", medians
        return "; ".join(messages), medians


def _same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x == y) | (np.isnan(x) & np.isnan(y))


def _compare(
    found: list[np.ndarray], exact: list[np.ndarray], spread: list[np.ndarray], avals: Sequence[Any]
) -> tuple[list[str], list[float]]:
    messages, medians = [], []
    for i, (f, e, s, aval) in enumerate(zip(found, exact, spread, avals, strict=True)):
        if f.shape != e.shape:
            messages.append(f"output {i} has shape {f.shape}, not {e.shape}")
            continue
        if not e.size:
            continue
        free = ~np.isfinite(e) | ~np.isfinite(s)
        if np.all(free):
            continue
        floats = jnp.issubdtype(aval.dtype, jnp.inexact)
        scale = np.max(np.abs(np.where(free, 0, e)))
        with np.errstate(all="ignore"):
            allowed = 2 * s + (2e-5 * np.abs(e) + 4e-6 * scale + 1e-30 if floats else 0)
            wrong = ~free & ~(np.abs(f - e) <= allowed)
        if floats:
            medians.append(float(np.median(np.where(free, np.inf, allowed) / (scale + 1e-30))))
        if np.any(wrong):
            at = tuple(int(k) for k in np.argwhere(wrong)[0])
            messages.append(
                f"output {i} at {at}: {f[at]}, float32 {e[at]}, allowed error {allowed[at]:.3g}"
                f" ({np.count_nonzero(wrong)} of {e.size} elements)"
            )
    return messages, medians


def near(args: Any, k: int, share: float) -> Any:
    """Returns the arguments with other digits: floats that differ by about a share of them."""
    rng = np.random.default_rng(k)
    other = lambda x: (x * (1 + share * rng.normal(size=x.shape))).astype(x.dtype)
    return jax.tree.map(lambda x: other(x) if x.dtype.kind == "f" else x, args)
