"""Policies as TOML files, for a person to read, change and keep under version control.

A file is data. Reading one compares words with lists of words: it imports nothing, runs nothing
and registers nothing, and the primitives that it names need not exist.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tomllib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from .cast_policy import CastPolicy, rule_name
from .choices import check_choice
from .errors import did_you_mean, shown, wrong_type
from .float8 import FLOAT8, RECIPES, Float8
from .registry import known_primitives, made_of
from .retired import instead_of
from .rules import ANY
from .tables import RULES_VERSION

VERSION = 2
"""Raised when a file gets a meaning that an older reader would miss."""

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


def as_path(path: Any, method: str) -> pathlib.Path:
    """Returns the path that a method of `Policy` was called with.

    Raises:
        TypeError: It is neither a string nor a path.
    """
    if isinstance(path, str | pathlib.Path):
        return pathlib.Path(path)
    fix = "Write one such as 'policy.toml'."
    raise wrong_type(f"Policy.{method} takes a path, a string or a pathlib.Path", path, fix)


def policy_text(policy: Any) -> str:
    r"""Returns the text of the file of a `Policy`.

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
            # Words, integers, bools and lists of words have one form in JSON and in TOML.
            options = {"recipe": FLOAT8, **value.changed}.items()
            tables += [_MATMUL, *(f"{name} = {json.dumps(x)}\n" for name, x in options)]
        elif value is not None:
            lines.append(f"{field.name} = {_quoted(str(value))}\n")
    if rules:
        lines += [_RULES, "rules = [\n", *rules, "]\n"]
    return "".join(lines + tables)


def _words(scope: str, primitive: str, what: Any) -> tuple[str, str, str]:
    """Returns the three words of a rule in a file."""
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
    text.encode()  # raises for half of a surrogate pair, which TOML cannot escape
    # JSON and TOML escape alike. TOML demands it of control characters alone; here, of all that an
    # editor would hide or misplace: U+202E reverses the direction of the text after it.
    characters = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in characters)


def policy_fields(content: bytes, start: str) -> dict[str, Any]:
    """Returns the arguments of `Policy` that a file holds.

    Args:
        content: The content of the file.
        start: The start of messages, such as "Policy file 'policy.toml'".

    Raises:
        TypeError: A value has the wrong type.
        ValueError: The content is not TOML, has no version or another one, or an unknown key.
    """
    table = _table(content, start)
    # First: another version may have keys that are unknown here.
    _check_versions(table.pop("version", None), table.pop("rules_version", RULES_VERSION), start)
    for key in table:
        if key not in _KEYS:
            hint = instead_of(key) or did_you_mean(key, _KEYS)
            raise ValueError(
                f"{start}: unknown key {shown(key)}.{hint} The keys are {', '.join(_KEYS)}."
            )
    if "compute_dtype" not in table:
        raise ValueError(f"{start} has no compute_dtype. Add: compute_dtype = 'bfloat16'")
    if "rules" in table:
        table["rules"] = _rules(table["rules"], start)
    if "matmul" in table:
        table["matmul"] = _recipe(table["matmul"], start)
    return table


def _table(content: bytes, start: str) -> dict[str, Any]:
    how = "Compare it with a file that Policy.save writes."
    try:
        # Some editors of Windows put a byte order mark in front, which is no TOML.
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{start} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Save "
            "it in the encoding UTF-8."
        ) from None
    except (ValueError, RecursionError) as error:  # also an integer of too many digits
        raise ValueError(f"{start} is not valid TOML: {shown(str(error))}. {how}") from None


def _check_versions(version: Any, rules_version: Any, start: str) -> None:
    """Raises for another version of the format, and warns of one of the rules."""
    fix = f"Write: version = {VERSION}"
    if version is None:
        raise ValueError(f"{start} has no version. Add the line: version = {VERSION}")
    if not isinstance(version, int) or isinstance(version, bool):
        raise wrong_type(f"{start}: version must be an integer", version, fix)
    if version != VERSION:
        older = f"Its scopes, precisions and rules are one list: rules = {_EXAMPLE}. {fix}"
        raise ValueError(
            f"{start} has version {hex(version)[:18]}, and this jmp_autocast reads version "
            f"{VERSION}. {'Upgrade jmp_autocast.' if version > VERSION else older}"
        )
    fix = f"Write: rules_version = '{RULES_VERSION}'"
    if not isinstance(rules_version, str):
        raise wrong_type(f"{start}: rules_version must be a string", rules_version, fix)
    if rules_version != RULES_VERSION:
        warnings.warn(
            f"{start} was saved under rules {shown(rules_version)}, and this jmp_autocast has "
            f"rules {RULES_VERSION!r}: some equations may have other dtypes, which CHANGELOG.md "
            f"lists under 'Dtypes'. Save the policy again. {fix}",
            stacklevel=4,
        )


def _rules(value: Any, start: str) -> tuple[tuple[str, ...], ...]:
    """Returns the rules of a file, and warns of primitives that look misspelled."""
    fix = f"Write rules = {_EXAMPLE}: scope, primitive or '*', and the rule."
    if not isinstance(value, list):
        raise wrong_type(f"{start}: rules must be an array", value, fix)
    known = known_primitives()
    for i, rule in enumerate(value):
        is_list = isinstance(rule, list) and len(rule) == 3
        if not is_list or not all(isinstance(word, str) and word for word in rule):
            raise wrong_type(f"{start}: rules[{i}] must be three words", rule, fix)
        # A primitive of a package that is not loaded yet is unknown, too, and no misspelling.
        if (name := rule[1]) == ANY or name in known:
            continue
        if hint := made_of(name) or did_you_mean(name, known, cutoff=0.8):
            warnings.warn(
                f"{start} has a rule for {shown(name)}, which is no known primitive: it does "
                f"nothing.{hint}",
                stacklevel=4,
            )
    return tuple(map(tuple, value))


def _recipe(value: Any, start: str) -> Float8:
    if not isinstance(value, Mapping):
        fix = f"Write a line [matmul], then recipe = {FLOAT8!r}."
        raise wrong_type(f"{start}: matmul must be a table", value, fix)
    options = dict(value)
    if "recipe" not in options:
        fix = f"Write a line [matmul], and below it recipe = {FLOAT8!r}."
        raise ValueError(f"{start}: matmul has no recipe. {fix}")
    name, known = options.pop("recipe"), [field.name for field in dataclasses.fields(Float8)]
    for key in options:
        if key not in known:
            raise ValueError(
                f"{start}: matmul: unknown key {key!r}.{did_you_mean(key, known)} The keys are "
                f"recipe, {', '.join(known)}."
            )
    try:
        check_choice("recipe", name, tuple(RECIPES))
        return dataclasses.replace(RECIPES[name], **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{start}: matmul: {error}") from None
