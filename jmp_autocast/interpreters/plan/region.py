"""Where an equation stands: what is known and asked there, and which precision is in force."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...policies import Float8, Policy, Rule, as_recipe, narrow_dtypes
from ...policies.precisions import precision_in
from ...scopes import BECAUSE, FULL, GOVERNED, mark, read_mark
from ..compat import scope_names, scope_stack
from .data import ValueState, Want
from .float64 import check_island
from .float_dtypes import float_dtype

AS_DECLARED = (mark(GOVERNED),)
"""The path of a jaxpr in which nothing is lowered, whatever the policy says."""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The precision in force where an equation stands.

    Args:
        wide: The wide dtype of the policy.
        compute_dtype: The dtype of matmuls, None where nothing is lowered.
        governed: An inner autocast has already dealt with the region.
        cause: The scope that says so.
        names: The enclosing scopes, as far as the policy looks at them.
        rules: The rules that the scopes add, as pairs of primitive and rule.
        precision: The precision of float32 products, None for that of each equation.
        float8: The recipe of products of weights in 8 bits, None where there are none.
        island: The dtype that all equations run in, one step above the wide one; else None.
    """

    wide: np.dtype
    compute_dtype: np.dtype | None
    governed: bool
    cause: str
    names: tuple[str, ...]
    rules: tuple[tuple[str, Rule], ...] = ()
    precision: str | None = None
    float8: Float8 | None = None
    island: np.dtype | None = None


class Place(NamedTuple):
    """An equation where it stands: made anew for each, in a third of a dataclass's time.

    Args:
        eqn: The equation.
        given: What is known of each operand.
        region: The precision of the scope that the equation is in.
        wants: What the readers of each result ask for; empty if no sweep said.
        is_last: It is a matrix product that no other one follows, where the policy asks.
        is_at_pick: It picks single elements, or a value goes through it before it is picked from.
        accumulates: It computes an accumulator: `marks`.
    """

    eqn: Any
    given: tuple[ValueState, ...]
    region: Region
    wants: tuple[Want, ...] = ()
    is_last: bool = False
    is_at_pick: bool = False
    accumulates: bool = False

    @property
    def name(self) -> str:
        """The name of the equation's primitive."""
        return self.eqn.primitive.name

    @property
    def wide(self) -> np.dtype:
        """The wide dtype of the policy."""
        return self.region.wide

    def kept(self, variable: Any) -> np.dtype | None:
        """Returns the dtype of a value that is not lowered, None for what is no float."""
        declared = self.declared(variable)
        return declared and (self.region.island or declared)

    @property
    def full(self) -> np.dtype:
        """The dtype here of what is not lowered: the wide one, or that of the island."""
        return self.region.island or self.region.wide

    def declared(self, variable: Any) -> np.dtype | None:
        """Returns the dtype that the program declares for a value, None for what is no float."""
        return float_dtype(variable.aval, self.region.wide)

    @property
    def floats(self) -> list[int]:
        """The positions of the float operands."""
        return [i for i, state in enumerate(self.given) if state.dtype is not None]


class Regions:
    """The regions of a program: one instance per trace.

    Args:
        policy: The policy of the program.
        marks_only: No pattern or rule of the policy looks at names: only marks matter, and a layer
            that stands at 96 paths is planned once.
        lowers_nothing: Why nothing is lowered where no scope names a dtype, else ``""``.
    """

    def __init__(self, policy: Policy, marks_only: bool, lowers_nothing: str = "") -> None:
        self._policy = policy
        self._lowers_nothing = lowers_nothing
        self._marks_only = marks_only
        self._compute_dtype = np.dtype(policy.compute_dtype)
        self._wide = policy.wide_dtype
        self._recipe = as_recipe(policy.matmul)
        self._found: dict[tuple[tuple[str, ...], tuple[str, ...]], Region] = {}
        # Of the equation asked for last: four of five stand where the one before stands.
        self._last: tuple[Any, tuple[str, ...], Region] | None = None

    @property
    def scopes(self) -> list[tuple[str, ...]]:
        """The scopes of all regions that were asked for."""
        return [path + names for path, names in self._found]

    def at(self, path: tuple[str, ...], eqn: Any) -> Region:
        """Returns the precision where an equation stands: the innermost scope that has one decides.

        Args:
            path: The scopes around its jaxpr, as far as the policy looks at them.
            eqn: The equation.
        """
        stack = scope_stack(eqn)
        if self._last is not None and self._last[0] is stack and self._last[1] == path:
            return self._last[2]
        region = self._within(path, scope_names(eqn))
        self._last = stack, path, region
        return region

    def _within(self, path: tuple[str, ...], names: tuple[str, ...]) -> Region:
        region = self._found.get((path, names))
        if region is None:
            # Scopes that no pattern looks at would only make equal regions differ.
            seen = names
            if self._marks_only:
                seen = tuple(name for name in names if read_mark(name) is not None)
            region = self._find(path + seen)
            if not region.governed:
                precision = precision_in(self._policy.precisions, path + seen)
                region = dataclasses.replace(region, precision=precision)
            self._found[path, names] = region
        return region

    def _find(self, names: tuple[str, ...]) -> Region:
        region = functools.partial(Region, self._wide)
        marks = [(i + 1, found) for i, name in enumerate(names) if (found := read_mark(name))]
        marks = [(depth, found) for depth, found in marks if not found.startswith(BECAUSE)]
        # Whatever stands there was planned by an inner autocast under its own policy.
        if any(found == GOVERNED for _, found in marks):
            return region(None, True, "an inner autocast governs the region", names)
        hits = [
            (depth, 0, dtype, f"scope {p!r}")
            for depth, p, dtype in self._policy.scope_matches(names)
        ]
        hits += [
            (depth, 1, self._wide if found == FULL else jnp.dtype(found), f"scope {found}")
            for depth, found in marks
        ]
        rules = self._policy.rules_in(names)
        if not hits and self._lowers_nothing:
            return region(None, False, self._lowers_nothing, names, rules)
        if not hits:
            return region(self._compute_dtype, False, "", names, rules, float8=self._recipe)
        # Of scopes at one depth a mark in the code wins, then the latest pattern. `max` returns the
        # first of equals, so the hits are reversed.
        _, _, dtype, cause = max(reversed(hits), key=lambda hit: hit[:2])
        if isinstance(dtype, str):
            # Asked for by name, a last product runs in 8 bits, too.
            recipe = dataclasses.replace(self._recipe or Float8(), skip=())
            return region(self._compute_dtype, False, cause, names, rules, float8=recipe)
        if dtype in narrow_dtypes(self._wide):
            return region(dtype, False, cause, names, rules)
        island = None if dtype == self._wide else check_island(dtype, cause, self._compute_dtype)
        return region(None, False, cause, names, rules, island=island)
