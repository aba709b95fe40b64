"""Policies as TOML files that a person can read, change and keep under version control.

A file is data: reading a file imports, runs and registers nothing. The primitives that a file names
need not exist.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from .cast_policy import CastPolicy, rule_name
from .errors import did_you_mean, shown, wrong_type
from .float8 import FLOAT8, Float8, as_recipe
from .registry import function_hint, known_primitives
from .retired import instead_of
from .rules import ANY
from .tables import RULES_VERSION

VERSION = 2
"""The version of the file format; it increases when an older reader would misread new files."""

_HEADER = """\
# A policy of jmp_autocast: how a program is cast. Policy.load(path) reads this file.
# It is data: nothing in it is run or imported.
"""
_RULES = """
# Scope, primitive or "*", and the rule: the innermost scope wins, then a named
# primitive, then the later rule.
"""
_MATMUL = "\n# Products of weights in 8 bits, and their options.\n[matmul]\n"
_EXAMPLE = "[['*', 'tanh', 'float32']]"
_KEYS = ("compute_dtype", "output_dtype", "level", "rules", "matmul")


def policy_text(policy: Any) -> str:
    r"""Returns the text of a file that holds a `Policy`.

    Raises:
        TypeError: A rule is a function.
        ValueError: A name or pattern has a character that TOML cannot hold.

    Example:
        >>> from jmp_autocast import BF16
        >>> print(policy_text(BF16.with_rules({"*": "float32"}, scope="*/ln\t")))
        # A policy of jmp_autocast: how a program is cast. Policy.load(path) reads this file.
        # It is data: nothing in it is run or imported.
        version = 2
        rules_version = "0.1"
        compute_dtype = "bfloat16"
        level = "o1"
        <BLANKLINE>
        # Scope, primitive or "*", and the rule: the innermost scope wins, then a named
        # primitive, then the later rule.
        rules = [
            ["*/ln\t", "*", "float32"],
        ]
    """
    lines = [_HEADER, f"version = {VERSION}\n", f"rules_version = {_quoted(RULES_VERSION)}\n"]
    rules: list[str] = []
    tables: list[str] = []
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if isinstance(value, tuple):
            triples = (", ".join(map(_quoted, _words(*rule))) for rule in value)
            rules += [f"    [{triple}],\n" for triple in triples]
        elif isinstance(value, Float8):
            # JSON writes words, integers, bools and lists of words in the form that TOML reads.
            options = {"recipe": FLOAT8, **value.changed}.items()
            tables += [_MATMUL, *(f"{name} = {json.dumps(x)}\n" for name, x in options)]
        elif value is not None:
            lines.append(f"{field.name} = {_quoted(str(value))}\n")
    if rules:
        lines += [_RULES, "rules = [\n", *rules, "]\n"]
    return "".join(lines + tables)


def _words(scope: str, primitive: str, what: Any) -> tuple[str, str, str]:
    """Returns a rule as the three words that a file holds."""
    if isinstance(what, str):
        return scope, primitive, what
    if isinstance(what, CastPolicy | np.dtype):
        return scope, primitive, what.name
    raise TypeError(
        f"Cannot save the policy: the rule for primitive {primitive!r} is a function, "
        f"{rule_name(what)}, and a policy file holds only data. Give the primitive a policy's name "
        f"instead, such as 'FP32', or call register_rule({primitive!r}, ...) in the program."
    )


def _quoted(text: str) -> str:
    text.encode()  # raises for a lone surrogate, which TOML cannot escape
    # TOML has the escapes of JSON. Beyond the control characters that TOML requires, every
    # character that an editor would hide or misplace is escaped, such as U+202E, which reverses the
    # text after it.
    characters = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in characters)


def policy_fields(content: bytes) -> dict[str, Any]:
    """Returns the arguments of `Policy` that a file holds.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: The content is not TOML, has an unknown key, or has another version of the
            format.
    """
    try:
        # Some Windows editors write a byte order mark, which TOML does not allow.
        table = tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # ValueError also if a number is too long
        raise ValueError(
            f"it is not valid TOML: {shown(str(error))}. Compare it with a file that Policy.save "
            "writes."
        ) from None
    # Versions are checked first, because another version may have keys that this one lacks.
    _check_versions(table.pop("version", None), table.pop("rules_version", RULES_VERSION))
    for key in table:
        if key not in _KEYS:
            hint = instead_of(key) or did_you_mean(key, _KEYS)
            raise ValueError(f"unknown key {shown(key)}.{hint} The keys are {', '.join(_KEYS)}.")
    if "compute_dtype" not in table:
        raise ValueError("it has no compute_dtype. Add: compute_dtype = 'bfloat16'")
    if "rules" in table:
        table["rules"] = _rules(table["rules"])
    if "matmul" in table:
        table["matmul"] = _recipe(table["matmul"])
    return table


def _check_versions(version: Any, rules_version: Any) -> None:
    """Raises for another version of the format; warns of another version of the default rules."""
    if version != VERSION:
        raise ValueError(
            f"version must be {VERSION}, got {shown(version)}: a newer one needs a newer "
            "jmp_autocast, and in an older one scopes and precisions were apart from the rules. "
            f"Write: version = {VERSION}, and rules = {_EXAMPLE}"
        )
    if rules_version != RULES_VERSION:
        warnings.warn(
            f"The policy was saved under rules {shown(rules_version)}, and this jmp_autocast has "
            f"rules {RULES_VERSION!r}: some equations may have other dtypes, which CHANGELOG.md "
            "lists under 'Dtypes'. Save the policy again.",
            stacklevel=4,
        )


def _rules(value: Any) -> tuple[tuple[Any, ...], ...]:
    """Returns the rules of a file, and warns of primitives that look misspelled."""
    is_list = isinstance(value, list)
    if not is_list or not all(isinstance(rule, list) and len(rule) == 3 for rule in value):
        fix = f"Write rules = {_EXAMPLE}: scope, primitive or '*', and the rule."
        raise wrong_type("rules must be an array of three words each", value, fix)
    known = known_primitives()
    for _, name, _ in value:
        # An unknown name may belong to a package that is not loaded yet; only a near miss warns.
        if not isinstance(name, str) or name == ANY or name in known:
            continue
        if hint := function_hint(name) or did_you_mean(name, known, cutoff=0.8):
            warnings.warn(
                f"The policy has a rule for {shown(name)}, which is no known primitive: it does "
                f"nothing.{hint}",
                stacklevel=4,
            )
    return tuple(map(tuple, value))


def _recipe(value: Any) -> Float8:
    options = dict(value) if isinstance(value, Mapping) else {}
    recipe = as_recipe(options.pop("recipe", None))
    if recipe is None:
        fix = f"Write a line [matmul], and below it recipe = {FLOAT8!r}."
        raise wrong_type("matmul must be a table with a recipe", value, fix)
    return dataclasses.replace(recipe, **options)
