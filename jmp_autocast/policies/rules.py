"""The rules of a policy: their values, and which one wins if several match an equation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .cast_policy import CastPolicy, Rule
from .choices import elsewhere
from .dtypes import COMPUTE_DTYPES, FLOAT32, FLOAT_DTYPES, find_dtype
from .errors import did_you_mean, shown, wrong_type
from .float8 import FLOAT8
from .patterns import check_pattern, match_depth
from .precisions import PRECISIONS, as_precision, is_precision
from .registry import as_rule, primitive_name
from .tables import CONTRACTIONS, STRUCTURAL, TRACED_FOR_DTYPES

ANY = "*"
"""The word for all primitives; in place of a scope, the word for the whole program."""

What: TypeAlias = Rule | np.dtype | str
"""The value of a rule: a cast policy, a function of the equation, a dtype, ``"float8"`` or a
precision."""

PolicyRule: TypeAlias = tuple[str, str, What]
"""A scope pattern, the name of a primitive or ``"*"``, and the value of the rule."""

WITHOUT_POLICY: frozenset[str] = STRUCTURAL | TRACED_FOR_DTYPES
"""Primitives that take no cast policy; a cast policy for ``"*"`` skips them."""

_IN_CODE = 2


def as_rules(value: Any) -> tuple[PolicyRule, ...]:
    """Returns the checked rules of a policy, without rules that a later rule replaces.

    Raises:
        TypeError: ``value`` is no tuple of triples, or holds a wrong type.
        ValueError: A cast policy, dtype or precision does not exist.
    """
    is_tuple = isinstance(value, tuple)
    if not is_tuple or not all(isinstance(r, tuple) and len(r) == 3 for r in value):
        fix = "Use Policy(...).with_rules({'tanh': 'float32'}, scope='*')."
        raise wrong_type("rules must be a tuple of triples", value, fix)
    found: dict[tuple[str, str, str], What] = {}
    for scope, primitive, what in value:
        name = primitive_name(primitive)
        read = as_what(what, name)
        key = check_pattern(scope), name, _question(read)
        # The later of two rules wins, so a rule that is given again moves to the end.
        found.pop(key, None)
        found[key] = read
    return tuple((scope, name, what) for (scope, name, _), what in found.items())


def _question(what: What) -> Literal["policy", "dtype", "precision"]:
    """Returns the kind of a rule's value. Only rules of one kind compete."""
    if isinstance(what, str):
        return "dtype" if what == FLOAT8 else "precision"
    return "dtype" if isinstance(what, np.dtype) else "policy"


def as_what(value: Any, primitive: str) -> What:
    """Returns the normalized value of a rule.

    Args:
        value: A `CastPolicy`, a dtype, a precision, a name of these, ``"float8"``, or a function.
        primitive: The primitive, or ``"*"``.

    Raises:
        TypeError: ``value`` is none of these.
        ValueError: The cast policy, dtype or precision does not exist, or the primitive cannot take
            it.

    Example:
        >>> as_what("float32", "tanh")
        <CastPolicy.FP32: 'fp32'>
        >>> as_what("float32", "*"), as_what("HIGHEST", "*")
        (dtype('float32'), 'highest')
    """
    dtype = find_dtype(value)
    if dtype is not None and dtype in FLOAT_DTYPES and primitive == ANY:
        return dtype
    if (rule := as_rule(value, primitive)) is not None:
        return rule
    if dtype is not None and dtype in FLOAT_DTYPES:
        return dtype
    is_product = primitive in (ANY, *CONTRACTIONS)
    if is_precision(value):
        if is_product:
            return as_precision(value, "rules")
        raise ValueError(
            f"The precision {value!r} is one of products, and {primitive!r} is none: give it "
            f"to one of {', '.join(sorted(CONTRACTIONS))}, or to '*'."
        )
    if isinstance(value, str) and value == FLOAT8:
        if is_product:
            return FLOAT8
        raise ValueError(
            f"Products of weights run in 8 bits, and {primitive!r} is none: give 'float8' to '*'."
        )
    name = value if dtype is None else dtype.name
    if not isinstance(name, str):
        what = "a CastPolicy, a dtype, a precision, a name of one, or a function of an EquationView"
        raise wrong_type(f"The rule for primitive {primitive!r} must be {what}", value)
    policies, dtypes = CastPolicy.__members__, [d.name for d in (FLOAT32, *COMPUTE_DTYPES)]
    hint = did_you_mean(name, [*dtypes, FLOAT8, *PRECISIONS])
    hint = elsewhere("matmul", name) or did_you_mean(name.upper(), policies) or hint
    raise ValueError(
        f"Unknown rule {shown(name)} for primitive {primitive!r}.{hint} It is a cast policy "
        f"({', '.join(policies)}), a dtype ({', '.join(dtypes)}), 'float8', or a precision."
    )


class Match(NamedTuple):
    """A rule that matches the scope of an equation. Of several, the largest `rank` wins.

    Args:
        depth: The depth of the matched scope.
        kind: 0 for a rule for ``"*"``, 1 for a rule for one primitive, 2 for a mark such as
            ``full_precision()``.
        position: The rule's position in the policy.
        primitive: The primitive, or ``"*"``.
        what: The rule's value.
        cause: The rule's name in reports.
    """

    depth: int
    kind: int
    position: int
    primitive: str
    what: Any  # a value of type `What`
    cause: str

    @property
    def rank(self) -> tuple[int, int, int]:
        """The key that orders matches: depth, kind, position."""
        return self[:3]


def match_in_code(depth: int, dtype: np.dtype, name: str) -> Match:
    """Returns the match for a mark such as `full_precision()`; it wins over rules for its scope."""
    return Match(depth, _IN_CODE, 0, ANY, dtype, f"scope {name}")


def matches(rules: Iterable[PolicyRule], names: Sequence[str]) -> list[Match]:
    """Returns a match for each rule whose pattern covers the scopes ``names``, outermost first."""
    found = []
    for i, (scope, name, what) in enumerate(rules):
        if (depth := match_depth(scope, names)) is not None:
            found.append(Match(depth, int(name != ANY), i, name, what, f"scope {scope!r}"))
    return found


class Said(NamedTuple):
    """The winning rules for an equation, at most one of each kind.

    Args:
        dtype: The rule that sets the compute dtype.
        policy: The rule with the cast policy or rule function.
        precision: The precision of a product that stays in float32.
    """

    dtype: Match | None
    policy: Match | None
    precision: str | None

    @property
    def rule(self) -> Rule | None:
        """The cast policy or rule function that wins; None if no rule sets one."""
        what = None if self.policy is None else self.policy.what
        # A rule with a 16-bit dtype for a named primitive lowers that primitive.
        return CastPolicy.LOWER_PRECISION_FP if isinstance(what, np.dtype) else what


def said_of(found: Iterable[Match], primitive: str) -> Said:
    """Returns the winning rules for an equation.

    Args:
        found: The matches with the scope of the equation.
        primitive: The name of the equation's primitive.

    Example:
        >>> rules = as_rules((("*", "tanh", "fp32"), ("*/mlp", "*", "float32")))
        >>> said_of(matches(rules, ["net"]), "tanh").rule
        <CastPolicy.FP32: 'fp32'>
        >>> found = said_of(matches(rules, ["net", "mlp"]), "tanh")
        >>> found.dtype.what, found.rule
        (dtype('float32'), None)
    """
    dtype = policy = precision = None
    for match in sorted(found, key=lambda match: match.rank):  # the largest rank wins
        is_named = match.primitive == primitive
        if not is_named and match.primitive != ANY:
            continue
        question = _question(match.what)
        if question == "precision":
            precision = match
        elif question == "dtype":
            dtype = match
            if is_named and match.what in COMPUTE_DTYPES:
                policy = match  # the dtype also decides how the primitive runs
        elif is_named or primitive not in WITHOUT_POLICY:
            policy = match
    # A scope in float32 competes with cast policies; a scope with a 16-bit compute dtype does not.
    lowers = dtype is None or isinstance(dtype.what, str) or dtype.what in COMPUTE_DTYPES
    if policy is not None and dtype is not None and not lowers:
        dtype, policy = (None, policy) if policy.rank > dtype.rank else (dtype, None)
    return Said(dtype, policy, None if precision is None else str(precision.what))


def unmatched_patterns(policy: Any, scopes: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Returns the scope patterns of a policy that match no scope of a program.

    Example:
        >>> from jmp_autocast import BF16
        >>> policy = BF16.with_rules({"*": "float32"}, scope="*/ln")
        >>> unmatched_patterns(policy, [["net", "head"]])
        ('*/ln',)
    """
    patterns = dict.fromkeys(scope for scope, _, _ in policy.rules)
    found = list(scopes) if patterns else []
    return tuple(p for p in patterns if all(match_depth(p, names) is None for names in found))
