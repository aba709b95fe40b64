"""Policies as TOML files, for a person to read, change and keep under version control.

A file is data. Reading one compares words with lists of words: it imports nothing, runs nothing
and registers nothing, and the primitives that it names need not exist.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
import tomllib
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .cast_policy import CastPolicy, Rule
from .choices import DOT_OUTPUTS, LEVELS
from .dtypes import COMPUTE_DTYPES, FLOAT32
from .registry import did_you_mean, structural_message
from .tables import STRUCTURAL

if TYPE_CHECKING:
    from .policy import Policy

VERSION = 1
"""Raised when a file gets a meaning that an older reader would miss."""

_COMPUTE = tuple(dtype.name for dtype in COMPUTE_DTYPES)
_FLOATS = (FLOAT32.name, *_COMPUTE)
_CHOICES: dict[str, tuple[str, ...]] = {
    "compute_dtype": _COMPUTE,
    "output_dtype": _FLOATS,
    "level": LEVELS,
    "dot_output": DOT_OUTPUTS,
}
_KEYS = ("version", *_CHOICES, "rules", "scopes", "scoped_rules")
_SCOPE_KEYS = ("pattern", "dtype")
_SCOPED_RULE_KEYS = ("pattern", "rules")
_POLICIES = tuple(policy.name for policy in CastPolicy)

_HEADER = """\
# A policy of jmp_autocast: how a program is cast. Policy.load(path) reads this file.
# It is data: nothing in it is run or imported.
"""
_RULES = """
# Primitive and cast policy. A name that is not made of letters, digits, _ and - is quoted.
[rules]
"""
_SCOPES = """
# Named scopes and their dtypes. Of those that match at one depth the last one wins.
"""
_SCOPED_RULES = """
# Rules that hold inside named scopes. Of those that match the innermost, then the last, wins.
"""


def write_policy(policy: Policy, path: str | pathlib.Path) -> None:
    """Writes a policy to a file, whole or not at all.

    Args:
        policy: The policy.
        path: The file; one that exists is replaced.

    Raises:
        TypeError: A rule is a function, or ``path`` is neither a string nor a path.
        ValueError: TOML cannot hold a name or pattern, or ``path`` is no regular file.
    """
    # A symbolic link stays one, and leads to the new file.
    target = pathlib.Path(os.path.realpath(_as_path(path, "save")))
    content = policy_text(policy).encode()
    if target.exists() and not target.is_file():
        raise ValueError(
            f"Cannot save a policy to {str(path)!r}, which is no regular file. Pass the path of a "
            "file, such as 'policy.toml'."
        )
    temporary = target.with_name(f".policy-{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def policy_text(policy: Policy) -> str:
    r"""Returns the text of a policy's file.

    Raises:
        TypeError: A rule is a function.
        ValueError: A name or pattern has a character that TOML cannot hold.

    Example:
        >>> from jmp_autocast import BF16
        >>> print(policy_text(BF16.with_scopes({"*/ln\t": "float32"})))
        # A policy of jmp_autocast: how a program is cast. Policy.load(path) reads this file.
        # It is data: nothing in it is run or imported.
        version = 1
        compute_dtype = "bfloat16"
        level = "o1"
        dot_output = "compute"
        <BLANKLINE>
        # Named scopes and their dtypes. Of those that match at one depth the last one wins.
        <BLANKLINE>
        [[scopes]]
        pattern = "*/ln\t"
        dtype = "float32"
    """
    options = {name: getattr(policy, name) for name in _CHOICES}
    lines = [f"version = {VERSION}\n"]
    lines += [f"{name} = {_quoted(str(v))}\n" for name, v in options.items() if v is not None]
    if policy.rules:
        lines.append(_RULES)
    lines += [_rule_line(primitive, rule) for primitive, rule in policy.rules]
    if policy.scopes:
        lines.append(_SCOPES)
    for pattern, dtype in policy.scopes:
        lines.append(f"\n[[scopes]]\npattern = {_quoted(pattern)}\ndtype = {_quoted(dtype.name)}\n")
    if policy.scoped_rules:
        lines.append(_SCOPED_RULES)
    for pattern, rules in _by_pattern(policy.scoped_rules):
        lines.append(f"\n[[scoped_rules]]\npattern = {_quoted(pattern)}\n[scoped_rules.rules]\n")
        lines += [_rule_line(primitive, rule) for primitive, rule in rules]
    return _HEADER + "".join(lines)


def _by_pattern(scoped_rules: Iterable[tuple[str, str, Rule]]) -> Iterable[Any]:
    """Groups neighbours: of rules at one depth the last wins, so that the order stays."""
    for pattern, group in itertools.groupby(scoped_rules, key=lambda each: each[0]):
        yield pattern, [(primitive, rule) for _, primitive, rule in group]


def _rule_line(primitive: str, rule: Rule) -> str:
    if not isinstance(rule, CastPolicy):
        raise TypeError(_function_message(primitive, rule))
    return f"{_key(primitive)} = {_quoted(rule.name)}\n"


def _function_message(primitive: str, rule: object) -> str:
    name = getattr(rule, "__qualname__", None) or repr(rule)
    return (
        f"Cannot save the policy: the rule for primitive {primitive!r} is a function, {name} of "
        f"module {getattr(rule, '__module__', None)!r}, and a policy file holds data alone. Give "
        "the primitive a policy's name instead, such as 'FP32', or leave the rule out and call "
        f"register_policy({primitive!r}, ...) in the code that loads the file."
    )


_BARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}


def _key(name: str) -> str:
    return name if name and _BARE.issuperset(name) else _quoted(name)


def _quoted(text: str) -> str:
    return f'"{"".join(_escaped(character, text) for character in text)}"'


def _escaped(character: str, text: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError(
            f"Cannot save the policy: {text!r} holds {character!r}, half of a surrogate pair, "
            "which no TOML file can hold. Take it out of the name or pattern."
        )
    # What an editor would not show, or would show as something else.
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def read_policy(path: str | pathlib.Path) -> dict[str, Any]:
    """Returns the arguments of `Policy` that a file holds.

    Args:
        path: The file.

    Raises:
        TypeError: A value has the wrong type, or ``path`` is neither a string nor a path.
        ValueError: The file is not TOML, has no version or a newer one, or a key or value in it
            is unknown.
        OSError: The file cannot be read.
    """
    file = _as_path(path, "load")
    start = f"Policy file {str(path)!r}"
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{start} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Save "
            "it in the encoding UTF-8."
        ) from None
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(
            f"{start} is not a policy: its values are nested too deeply. {_HOW}"
        ) from None
    except ValueError as error:  # also an integer of too many digits
        raise ValueError(f"{start} is not valid TOML: {_clipped(str(error))}. {_HOW}") from None
    return _fields(table, start)


_HOW = "Compare it with a file that Policy.save writes."


def _fields(table: Mapping[str, Any], start: str) -> dict[str, Any]:
    # First: a newer file may have keys that are unknown here.
    _check_version(table, start)
    _check_keys(table, _KEYS, start)
    if "compute_dtype" not in table:
        raise ValueError(f"{start} has no compute_dtype. Add: compute_dtype = 'bfloat16'")
    fields: dict[str, Any] = {
        name: _choice(table[name], allowed, f"{start}: {name}")
        for name, allowed in _CHOICES.items()
        if name in table
    }
    fields["rules"] = tuple(_rules(table.get("rules", {}), f"{start}: rules"))
    fields["scopes"] = tuple(_scopes(table.get("scopes", []), start))
    fields["scoped_rules"] = tuple(_scoped_rules(table.get("scoped_rules", []), start))
    return fields


def _check_version(table: Mapping[str, Any], start: str) -> None:
    if "version" not in table:
        raise ValueError(f"{start} has no version. Add the line: version = {VERSION}")
    version = table["version"]
    if not isinstance(version, int) or isinstance(version, bool):
        raise TypeError(
            f"{start}: version must be an integer, got {_shown(version)}. Write: version = "
            f"{VERSION}"
        )
    if version > VERSION:
        raise ValueError(
            f"{start} has version {_number(version)}, and this jmp_autocast reads version "
            f"{VERSION}. Upgrade jmp_autocast, or save the policy with this one."
        )
    if version < 1:
        raise ValueError(
            f"{start} has version {_number(version)}, and the first one is 1. Write: version = "
            f"{VERSION}"
        )


def _rules(table: Any, start: str) -> Iterable[tuple[str, CastPolicy]]:
    if not isinstance(table, dict):
        raise TypeError(
            f"{start} must be a table, got {_shown(table)}. Write a line [rules], or "
            "[scoped_rules.rules], and lines such as tanh = 'FP32' below it."
        )
    for name, value in table.items():
        where = f"{start}.{_clipped(_shown_key(name))}"
        if not name:
            raise ValueError(f"{where} names no primitive. Write lines such as tanh = 'FP32'.")
        if name in STRUCTURAL:
            raise ValueError(f"{where}: {structural_message(name)}")
        if isinstance(value, dict):
            raise TypeError(
                f"{where} must be a policy's name, got a table. Put quotes around a primitive's "
                "name that has a dot."
            )
        # As in `with_rules`, capitals or not.
        word = value.upper() if isinstance(value, str) else value
        yield name, CastPolicy[_choice(word, _POLICIES, where)]


def _scopes(tables: Any, start: str) -> Iterable[tuple[str, str]]:
    fix = "Write a line [[scopes]] above each pattern = '*/LayerNorm_*' with its dtype."
    for where, table in _patterned(tables, _SCOPE_KEYS, f"{start}: scopes", fix):
        yield table["pattern"], _choice(table["dtype"], _FLOATS, f"{where}.dtype")


def _scoped_rules(tables: Any, start: str) -> Iterable[tuple[str, str, CastPolicy]]:
    fix = (
        "Write a line [[scoped_rules]] above each pattern = '*/head', and below it a line "
        "[scoped_rules.rules] with lines such as tanh = 'FP32'."
    )
    for where, table in _patterned(tables, _SCOPED_RULE_KEYS, f"{start}: scoped_rules", fix):
        for primitive, rule in _rules(table["rules"], f"{where}.rules"):
            yield table["pattern"], primitive, rule


def _patterned(
    tables: Any, keys: Sequence[str], start: str, fix: str
) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yields the tables of an array, each with a good pattern, and where it stands."""
    if not isinstance(tables, list):
        raise TypeError(f"{start} must be an array of tables, got {_shown(tables)}. {fix}")
    for position, table in enumerate(tables):
        where = f"{start}[{position}]"
        if not isinstance(table, dict):
            raise TypeError(f"{where} must be a table, got {_shown(table)}. {fix}")
        _check_keys(table, keys, where)
        for key in keys:
            if key not in table:
                raise ValueError(f"{where} has no {key}. {fix}")
        pattern = table["pattern"]
        if not isinstance(pattern, str):
            raise TypeError(f"{where}.pattern must be a string, got {_shown(pattern)}. {fix}")
        if not pattern:
            raise ValueError(f"{where}.pattern is empty. Write one such as '*/LayerNorm_*'.")
        yield where, table


def _check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(
                f"{where}: unknown key {_shown(key)}.{did_you_mean(_clipped(key), known)} The keys "
                f"are {', '.join(known)}."
            )


def _choice(value: Any, allowed: Collection[str], where: str) -> str:
    words = ", ".join(map(repr, allowed))
    if not isinstance(value, str):
        raise TypeError(f"{where} must be a string, one of {words}, got {_shown(value)}.")
    if value not in allowed:
        raise ValueError(
            f"{where} must be one of {words}, got {_shown(value)}."
            f"{did_you_mean(_clipped(value), allowed)}"
        )
    return value


def _shown(value: Any) -> str:
    # What a stranger wrote: it may be long, or nested so deeply that repr fails.
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return repr(_clipped(value))
    shown = _number(value) if isinstance(value, int) else repr(value)
    return f"{shown} of type {type(value).__name__}"


def _number(value: int) -> str:
    # Python refuses to write out very long ones in decimal.
    return repr(value) if abs(value) < 2**63 else f"{hex(value)[:18]}..."


def _shown_key(name: str) -> str:
    return name if _BARE.issuperset(name) and name else repr(name)


def _clipped(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def _as_path(path: Any, method: str) -> pathlib.Path:
    if isinstance(path, str | pathlib.Path):
        return pathlib.Path(path)
    raise TypeError(
        f"Policy.{method} takes a path, a string or a pathlib.Path, got {path!r} of type "
        f"{type(path).__name__}. Write one such as 'policy.toml'."
    )
