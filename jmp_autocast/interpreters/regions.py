"""The dtype and precision in force at an equation, read from the scopes around it.

A region is *lowered* if its equations may run in a 16-bit compute dtype. A *mark* is a scope name
that the package itself adds, such as that of ``full_precision()``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..policies import COMPUTE_DTYPES, FLOAT32, CastPolicy, Policy, Rule
from ..policies.registry import known_rule
from ..policies.rules import WITHOUT_POLICY, Match, match_in_code, matches, said_of
from ..scopes import BECAUSE, CAST, FULL, GOVERNED, mark, read_mark
from .compat import JaxprEqn, scope_names

AS_DECLARED = (mark(GOVERNED),)
"""The scope path under which a jaxpr keeps its declared dtypes, whatever the policy."""

# Marks with these prefixes record a change by the package, and do not affect the dtype.
_OF_CALLS = (BECAUSE, CAST)

PlansProduct: TypeAlias = Callable[..., Any]
"""The type of `Region.product`. The arguments are a product (`Context`), its plan in the compute
dtype, and whether gradients of parameters are float32. The result is the new plan of the product;
see `plan/copies.py`.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The dtype and precision in force at an equation.

    Args:
        compute_dtype: The dtype of matmuls; None if nothing is lowered.
        governed: Whether an inner autocast has already planned the region.
        cause: The scope that decides the dtype.
        names: The enclosing scopes that the policy's patterns can match.
        rule: The policy's rule for the equation, or None.
        precision: The precision of float32 products; None if each product keeps its own.
        default_precision: The precision of products for which neither policy nor program has one.
        product: Plans products that run in another dtype; None if all run in the compute dtype.
        abstains: Whether inputs of the program have no vote, as at level "compute".
    """

    compute_dtype: np.dtype | None
    governed: bool
    cause: str
    names: tuple[str, ...]
    rule: Rule | None = None
    precision: str | None = None
    default_precision: str | None = None
    product: PlansProduct | None = None
    abstains: bool = False

    @property
    def lowers(self) -> bool:
        """Whether anything is lowered here; if not, the equation stays as it is written."""
        return self.compute_dtype is not None

    def may_change(self, primitive: str) -> bool:
        """Returns whether a pass of `before` may rewrite an equation of the region.

        A user's rule that is a function may expect the equation as it was traced.

        Args:
            primitive: The name of the equation's primitive.
        """
        rule, origin = known_rule(primitive, self.rule)
        return self.lowers and (
            origin not in ("rules", "registered") or isinstance(rule, CastPolicy)
        )


RegionOf: TypeAlias = Callable[[Any], Region]
"""The type of functions from an equation to its region."""


class Regions:
    """The regions of a program; each trace has its own instance.

    Args:
        policy: The policy of the program.
        marks_only: Whether no pattern or rule of the policy matches names. Then only marks matter,
            and a layer that is called in 96 scopes is planned once.
        product: Returns the `Region.product` for a name such as ``"float8"``, which the policy
            gives for a scope in place of a dtype, or for "" if it gives none. May return None.
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
        self._compute_dtype = np.dtype(policy.compute_dtype)
        # All primitives share one region per path, except those with a rule and those that take no
        # cast policy.
        self._named = WITHOUT_POLICY.union(name for _, name, _ in policy.rules)
        self._matches: dict[tuple[str, ...], list[Match]] = {}
        self._found: dict[tuple[tuple[str, ...], tuple[str, ...], str], Region] = {}

    @property
    def scopes(self) -> list[tuple[str, ...]]:
        """The scopes of all regions that were asked for so far."""
        return list(dict.fromkeys(path + names for path, names, _ in self._found))

    def at(self, path: tuple[str, ...], eqn: JaxprEqn) -> Region:
        """Returns the region of an equation.

        Args:
            path: The scopes around its jaxpr that the policy's patterns can match.
            eqn: The equation.
        """
        names, primitive = scope_names(eqn), eqn.primitive.name
        key = path, names, primitive if primitive in self._named else ""
        if (found := self._found.get(key)) is None:
            # If no pattern matches names, all names but marks are dropped, so that regions of
            # different names compare as equal.
            seen = names
            if self._marks_only:
                seen = tuple(name for name in names if read_mark(name) is not None)
            found = self._found[key] = self._find(path + seen, key[-1])
        return found

    def _find(self, names: tuple[str, ...], primitive: str) -> Region:
        # An inner autocast has planned this equation under its own policy, so this policy changes
        # nothing.
        if AS_DECLARED[0] in names:
            return Region(None, True, "an inner autocast governs the region", names)
        if names not in self._matches:
            found = matches(self._policy.rules, names)
            self._matches[names] = [*found, *_matches_in_code(names)]
        said = said_of(self._matches[names], primitive)
        what, cause = ("", "") if said.dtype is None else (said.dtype.what, said.dtype.cause)
        if isinstance(what, str):
            dtype, product = self._compute_dtype, self._product(what)
        else:
            dtype, product = what if what in COMPUTE_DTYPES else None, None
        precisions = said.precision, self._default_precision
        return Region(
            dtype, False, cause, names, said.rule, *precisions, product, self._policy.data_abstains
        )


def _matches_in_code(names: Sequence[str]) -> Iterator[Match]:
    """Yields a match for each name that a ``full_precision()`` or ``compute_precision()`` made."""
    for i, found in enumerate(map(read_mark, names)):
        if found is not None and not found.startswith(_OF_CALLS):
            yield match_in_code(i + 1, FLOAT32 if found == FULL else jnp.dtype(found), found)
