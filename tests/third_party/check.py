"""Runs a program with and without autocast, and measures what they differ by."""

import functools

import jax
import numpy as np

from tests.support.jaxprs import dot_dtypes

from .noise import difference, noise, unit_roundoff
from .program import Draw, Traced, directions_of, floats, is_float, value_and_gradient

# A result that is zero but for rounding, such as the gradient of a bias before a norm, is off by
# a part of what cancels in it: of the norm of all results of its kind.
CANCELLED = 1 / 30
# How many times the noise of one rounding the results may be off.
ROUNDINGS = 3


class Comparison:
    """One program, built once: its float32 results, and how those in 16 bits compare."""

    def __init__(self, name, program):
        self.program = program
        draw = Draw(name)
        with jax.numpy_dtype_promotion("standard"):
            self.fn, self.args = program.build(draw)
            self.directions = directions_of(self.fn, self.args, draw)
            self.plain = self._traced(self.fn)

    def _traced(self, fn):
        with jax.numpy_dtype_promotion("standard"):
            return Traced(value_and_gradient(self.program, fn), self.args, self.directions)

    @functools.cached_property
    def exact(self):
        return self.plain(self.args, self.directions)

    def low(self, dtype):
        """The program under autocast."""
        return self._traced(self.program.cast(self.fn, dtype))

    def errors(self, low, dtype):
        """(path, error, allowed error) of each result."""
        inputs = (self.args, self.directions)
        got, unit = low(*inputs), unit_roundoff(dtype)
        noises = noise(self.plain, inputs, dtype, self.exact)
        solver = self.program.solver
        found, start = [], 0
        for kind, part, exact in zip(("value", "gradient"), got, self.exact, strict=True):
            whole = np.sqrt(sum(difference(e, e * 0) ** 2 for e in floats(exact)))
            for (path, g), e in zip(
                jax.tree_util.tree_leaves_with_path(part), jax.tree.leaves(exact), strict=True
            ):
                where = kind + jax.tree_util.keystr(path)
                if is_float(e):
                    size = difference(e, e * 0) + CANCELLED * whole
                    allowed = ROUNDINGS * (unit * size + noises[start]) + solver * size
                    found.append((where, error(g, e), allowed))
                else:
                    found.append((where, float((g != e).sum()), 0.0))
                start += 1
        return found


def error(got, exact):
    """The norm of the difference; infinite if one is finite and the other is not the same."""
    finite = np.isfinite(exact)
    same = np.where(finite, np.isfinite(got), (got == exact) | np.isnan(exact))
    return difference(got, exact) if same.all() else np.inf


def matrix_products(jaxpr):
    """The operand dtypes of matmuls and convolutions between floats."""
    return [(lhs, rhs) for lhs, rhs, _ in dot_dtypes(jaxpr) if "float" in lhs and "float" in rhs]
