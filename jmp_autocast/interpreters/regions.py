"""The precision in force where an equation stands: what the scopes around it say."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..policies import FLOAT32, FLOAT64, CastPolicy, Emulated, Policy, Rule, narrow_dtypes
from ..policies.precisions import precision_in
from ..scopes import BECAUSE, CAST, FULL, GOVERNED, KERNEL, STORED, mark, read_mark
from .compat import JaxprEqn, scope_names
from .compat.settings import ENABLE_FLOAT64, has_float64

AS_DECLARED = (mark(GOVERNED),)
"""The path of a jaxpr in which nothing is lowered, whatever the policy says."""

# They say what happened to an equation, and nothing of its dtype.
_OF_CALLS = (BECAUSE, CAST, KERNEL, STORED)

PlansProduct: TypeAlias = Callable[..., Any]
"""From a product (`Place`), its plan in the compute dtype, and whether the gradients of sources are
float32, to the plan that another room makes of it: `plan/rooms.py`."""


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
        default_precision: That of products of which neither policy nor program says one.
        product: Plans products that run otherwise than in the compute dtype; None for none.
        island: The dtype that all equations run in, one step above the wide one; else None.
        emulated: The format that some of its numbers are rounded to; None for none.
    """

    wide: np.dtype
    compute_dtype: np.dtype | None
    governed: bool
    cause: str
    names: tuple[str, ...]
    rules: tuple[tuple[str, Rule], ...] = ()
    precision: str | None = None
    default_precision: str | None = None
    product: PlansProduct | None = None
    island: np.dtype | None = None
    emulated: Emulated | None = None

    @property
    def lowers(self) -> bool:
        """Whether anything is lowered here: elsewhere a program stays as it is written."""
        return self.compute_dtype is not None and self.island is None

    def may_change(self, policy: Policy, name: str) -> bool:
        """Returns whether a pass may write equations of a primitive otherwise (`before`).

        Not where a function of the user's decides on it: it may be made for them as they are.

        Args:
            policy: The policy of the program.
            name: The name of the primitive.
        """
        rule, origin = policy.rule_for(name, self.rules)
        return self.lowers and (
            origin not in ("rules", "registered") or isinstance(rule, CastPolicy)
        )


RegionOf: TypeAlias = Callable[[Any], Region]
"""From an equation to its region."""


class Regions:
    """The regions of a program: one instance per trace.

    Args:
        policy: The policy of the program.
        marks_only: No pattern or rule of the policy looks at names: only marks matter, and a layer
            that stands at 96 paths is planned once.
        product: From what the policy says of a scope to `Region.product`; None for none.
        default_precision: As for `Region`.
    """

    def __init__(
        self,
        policy: Policy,
        marks_only: bool,
        product: Callable[[str], PlansProduct | None] | None = None,
        default_precision: str | None = None,
    ) -> None:
        self._policy = policy
        self._default_precision = default_precision
        self._product = product or (lambda _: None)
        self._marks_only = marks_only
        self.has_islands: bool = False  # of those that were asked for
        self._compute_dtype = np.dtype(policy.compute_dtype)
        self._wide = policy.wide_dtype
        self._found: dict[tuple[tuple[str, ...], tuple[str, ...]], Region] = {}

    @property
    def scopes(self) -> list[tuple[str, ...]]:
        """The scopes of all regions that were asked for."""
        return [path + names for path, names in self._found]

    def at(self, path: tuple[str, ...], eqn: JaxprEqn) -> Region:
        """Returns the precision where an equation stands: the innermost scope that has one decides.

        Args:
            path: The scopes around its jaxpr, as far as the policy looks at them.
            eqn: The equation.
        """
        names = scope_names(eqn)
        if (path, names) not in self._found:
            # Scopes that no pattern looks at would only make equal regions differ.
            seen = names
            if self._marks_only:
                seen = tuple(name for name in names if read_mark(name) is not None)
            region = self._find(path + seen)
            if not region.governed:
                precision = precision_in(self._policy.precisions, path + seen)
                region = dataclasses.replace(
                    region, precision=precision, default_precision=self._default_precision
                )
            self._found[path, names] = region
        return self._found[path, names]

    def _find(self, names: tuple[str, ...]) -> Region:
        region = functools.partial(Region, self._wide)
        marks = [(i + 1, found) for i, name in enumerate(names) if (found := read_mark(name))]
        marks = [(depth, found) for depth, found in marks if not found.startswith(_OF_CALLS)]
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
        if not hits:
            return region(self._compute_dtype, False, "", names, rules, product=self._product(""))
        # Of scopes at one depth a mark in the code wins, then the latest pattern. `max` returns the
        # first of equals, so the hits are reversed.
        _, _, dtype, cause = max(reversed(hits), key=lambda hit: hit[:2])
        if isinstance(dtype, str):
            product = self._product(dtype)
            return region(self._compute_dtype, False, cause, names, rules, product=product)
        if isinstance(dtype, Emulated):
            return region(None, False, cause, names, rules, emulated=dtype)
        if dtype in narrow_dtypes(self._wide):
            return region(dtype, False, cause, names, rules)
        island = None if dtype == self._wide else _check_island(dtype, cause, self._compute_dtype)
        self.has_islands |= island is not None
        return region(None, False, cause, names, rules, island=island)


def _check_island(dtype: np.dtype, cause: str, compute_dtype: np.dtype) -> np.dtype:
    """Returns the dtype of an island, a region that is wider than the program.

    Args:
        dtype: What its scope asks for.
        cause: The scope, for messages.
        compute_dtype: The compute dtype of the policy.

    Raises:
        ValueError: JAX has no float64 now; or the dtype is no wider than the program.
    """
    # A pattern was checked with the policy that it belongs to; a mark in the code knew of none.
    if dtype != FLOAT64:
        raise ValueError(
            f"{cause} asks for {dtype} in a program with compute_dtype={compute_dtype}, which is "
            f"cast between {FLOAT64} and {FLOAT32}. Write one of these two."
        )
    if not has_float64():
        raise ValueError(
            f"{cause} asks for float64, and JAX makes no float64 arrays while jax_enable_x64 is "
            f"off. {ENABLE_FLOAT64}, or leave the scope out."
        )
    return dtype
