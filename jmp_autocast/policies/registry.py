"""Rules for primitives of other packages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp

from .callables import check_rule_like, is_function
from .cast_policy import CastPolicy, Rule
from .dtypes import FLOAT32, find_dtype
from .errors import did_you_mean, with_usage, wrong_type
from .tables import DEFAULT_RULES, STRUCTURAL, TRACED_FOR_DTYPES

_registered: dict[str, Rule] = {}


@with_usage("register_rule(primitive, rule)")
def register_rule(primitive: Any, policy_or_rule: Rule | str) -> None:
    """Registers the cast policy of a primitive for every program that is traced afterwards.

    Use this in a package that defines a primitive; for one program, use `Policy.with_rules`. A
    function that was jitted and traced before the registration keeps its casts.

    Args:
        primitive: The primitive object or its name.
        policy_or_rule: A `CastPolicy`, its name, or a rule function from an `EquationView` to a
            policy or a `Decision` (as in TVM's mixed-precision RFC). The latest registration of a
            primitive wins, so that a reloaded module replaces its rule.

    Raises:
        TypeError: ``primitive`` is neither a primitive nor a string, or the rule is neither a
            policy nor callable.
        ValueError: The policy name is unknown, or a structural primitive, such as ``scan`` or
            ``cond``, gets a cast policy. The equations in its body have cast policies; the
            primitive itself may only have a rule function.

    Example:
        >>> from jmp_autocast import CastPolicy, register_rule
        >>> register_rule("my_fused_norm", CastPolicy.FP32)
    """
    name = primitive_name(primitive)
    rule = as_rule(policy_or_rule, name)
    if rule is None:
        raise _no_rule(policy_or_rule, name)
    _registered[name] = rule


def registered_rules() -> tuple[tuple[str, Rule], ...]:
    """Returns all registered rules, each with its primitive's name."""
    return tuple(_registered.items())


def function_hint(name: str) -> str:
    """Returns a hint for the name of a JAX function that is no primitive, "" for any other word.

    Example:
        >>> function_hint("matmul").split(": ")[0]
        " 'matmul' is a function and no primitive"
    """
    word = name.lower()
    if not any(is_function(getattr(module, word, None)) for module in (jnp, jax.nn)):
        return ""
    return (
        f" {name!r} is a function and no primitive: explain(fn, *args) lists the primitives that "
        "it is made of. Give rules for those, or put the call in jax.named_scope("
        f"{word!r}) and write with_rules({{'*': 'float32'}}, scope='*{word}')."
    )


def known_primitives() -> frozenset[str]:
    """Returns the names of the primitives in the tables, and of all with a registered rule."""
    return STRUCTURAL.union(DEFAULT_RULES, _registered)


def primitive_name(primitive: Any) -> str:
    """Returns the name of a primitive given as an object or as its name.

    Raises:
        TypeError: ``primitive`` is neither.
    """
    # A primitive is recognized by its `bind` method, because JAX has moved its class between
    # modules.
    is_primitive = callable(getattr(primitive, "bind", None)) and not isinstance(primitive, type)
    name = primitive.name if is_primitive else primitive
    if not isinstance(name, str) or not name:
        word = getattr(primitive, "__name__", "")
        is_known = word in known_primitives()
        raise wrong_type(
            "A primitive is given by its name or as a jax.extend.core.Primitive",
            primitive,
            f"Write its name, {word!r}." if is_known else function_hint(word).lstrip(),
        )
    return name


def as_rule(value: Any, primitive: str) -> Rule | None:
    """Returns the rule function or cast policy that a value stands for; None for other values.

    Raises:
        TypeError: A rule function does not take one argument, or is not hashable.
        ValueError: The primitive is structural, or holds a program that was traced for the dtypes
            of its operands.
    """
    if is_function(value):
        check_rule_like(value, f"The rule for primitive {primitive!r}", "an EquationView")
        return cast(Rule, value)
    # A loop takes no cast policy, which would override those of the equations in its body.
    if primitive in STRUCTURAL:
        raise ValueError(
            f"Primitive {primitive!r} is structural: it has no cast policy of its own, the "
            "equations inside it have. Give a rule for those, or one for '*' with scope= for the "
            "region. To replace the whole equation, give it a function that returns "
            "Decision(emit=...) or None."
        )
    if isinstance(value, str) and value.upper() in CastPolicy.__members__:
        value = CastPolicy[value.upper()]
    elif find_dtype(value) == FLOAT32:
        value = CastPolicy.FP32
    if not isinstance(value, CastPolicy):
        return None
    check_obeyed(primitive, value)
    return value


def _no_rule(value: Any, primitive: str) -> Exception:
    expected = (
        f"The rule for primitive {primitive!r} must be a CastPolicy, its name, or a function of "
        "an EquationView"
    )
    if not isinstance(value, str):
        return wrong_type(expected, value)
    names = list(CastPolicy.__members__)
    hint = did_you_mean(value.upper(), names)
    # A 16-bit dtype is no cast policy, because the policy of a program sets the compute dtype.
    if find_dtype(value) is not None:
        hint = " Operations are lowered to the compute dtype: write 'LOWER_PRECISION_FP'."
    return ValueError(f"{expected}, got {value!r}.{hint} The policies are {', '.join(names)}.")


def check_obeyed(primitive: str, policy: CastPolicy) -> None:
    """Raises ValueError if a policy casts operands of a primitive in `TRACED_FOR_DTYPES`."""
    if primitive in TRACED_FOR_DTYPES and policy is not CastPolicy.KEEP:
        raise ValueError(
            f"Primitive {primitive!r} holds a program that was traced for the dtypes of its "
            f"operands, and cannot run on others: {policy.name} cannot be obeyed. Give its caller "
            "a rule that returns Decision(emit=function, operand_dtype=eqn.compute_dtype), which "
            "traces the function again."
        )


def has_rule_functions(rules: Iterable[tuple[str, str, Any]]) -> bool:
    """Returns whether any rule is a function, which may depend on more than the primitive."""
    whats = (what for _, _, what in rules)
    return any(map(is_function, (*whats, *_registered.values())))


def known_rule(primitive: str, of_policy: Rule | None = None) -> tuple[Rule, str]:
    """Returns the rule that decides for a primitive, and its origin, as `Policy.rule_for` does.

    Args:
        primitive: The name of the primitive.
        of_policy: The rule of the program's policy; None if the policy has none.

    Example:
        >>> known_rule("exp")
        (<CastPolicy.FP32: 'fp32'>, 'default')
    """
    if of_policy is not None:
        return of_policy, "rules"
    if primitive in _registered:
        return _registered[primitive], "registered"
    if (rule := DEFAULT_RULES.get(primitive)) is not None:
        return rule, "default"
    return CastPolicy.KEEP, "unknown"
