"""Policies as TOML files, for a person to read, change and keep under version control.

A file is data. Reading one compares words with lists of words: it imports nothing, runs nothing
and registers nothing, and the primitives that it names need not exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import tomllib
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from .cast_policy import CastPolicy, Rule, rule_name
from .choices import WORDS, check_choice
from .dtypes import COMPUTE_DTYPES, DEFAULT, FLOAT_DTYPES, SHORT_NAMES, widest_first
from .errors import did_you_mean, wrong_type
from .float8 import FLOAT8, Float8, recipe_lines, recipe_of
from .formats import Emulated, is_format, parse
from .kernels import KERNEL_WORDS
from .precisions import PRECISIONS
from .registry import known_primitives, made_of, structural_message
from .storage import STORAGE_WORDS
from .tables import RULES_VERSION, STRUCTURAL

VERSION = 1
"""Raised when a file gets a meaning that an older reader would miss."""

_COMPUTE = (*(dtype.name for dtype in COMPUTE_DTYPES), DEFAULT)
_FLOATS = tuple(dtype.name for dtype in widest_first(FLOAT_DTYPES))
_SCOPE_DTYPES = (*_FLOATS, FLOAT8)
_OPTIONS = ("compute_dtype", "output_dtype", *WORDS)
_POLICIES = tuple(policy.name for policy in CastPolicy)

_HEADER = """\
# A policy of jmp_autocast: how a program is cast. Policy.load(path) reads this file.
# It is data: nothing in it is run or imported.
"""
_MATMUL = "\n# Products of weights in 8 bits, and their options.\n[matmul]\n"
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
_PRECISIONS = """
# Precisions of float32 products in named scopes; "*" is the whole program. The innermost wins.
"""
_KERNELS = """
# Kernels that run with 16-bit operands, by name or pattern. Of those that match the last one wins.
[kernels]
"""
_STORAGE = """
# What is stored in 16 bits, by the paths of arguments, results and carries. The last match wins.
[storage]
"""
_HEADINGS = (_MATMUL, _KERNELS, _STORAGE, _RULES, _SCOPES, _SCOPED_RULES, _PRECISIONS)


def write_policy(arguments: Mapping[str, Any], path: str | pathlib.Path) -> None:
    """Writes a policy to a file, whole or not at all.

    Args:
        arguments: The arguments of `Policy`, as its fields hold them.
        path: The file; one that exists is replaced.

    Raises:
        TypeError: A rule is a function, or ``path`` is neither a string nor a path.
        ValueError: TOML cannot hold a name or pattern, or ``path`` is no regular file.
    """
    # A symbolic link stays one, and leads to the new file.
    target = pathlib.Path(os.path.realpath(_as_path(path, "save")))
    content = policy_text(arguments).encode()
    if target.exists() and not target.is_file():
        raise ValueError(
            f"Cannot save a policy to {str(path)!r}, which is not a regular file. Pass the path of "
            "a file, such as 'policy.toml'."
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


def policy_text(arguments: Mapping[str, Any]) -> str:
    r"""Returns the text of a policy's file.

    Args:
        arguments: As for `write_policy`.

    Raises:
        TypeError: A rule is a function.
        ValueError: A name or pattern has a character that TOML cannot hold.

    Example:
        >>> from jmp_autocast import BF16
        >>> print(policy_text(vars(BF16.with_scopes({"*/ln\t": "float32"}))))
        # A policy of jmp_autocast: how a program is cast. Policy.load(path) reads this file.
        # It is data: nothing in it is run or imported.
        version = 1
        rules_version = "0.1"
        compute_dtype = "bfloat16"
        level = "o1"
        dot_output = "compute"
        weight_gradients = "float32"
        <BLANKLINE>
        # Named scopes and their dtypes. Of those that match at one depth the last one wins.
        <BLANKLINE>
        [[scopes]]
        pattern = "*/ln\t"
        dtype = "float32"
    """
    options = {name: arguments[name] for name in _OPTIONS}
    rules = [_rule_line(primitive, rule) for primitive, rule in arguments["rules"]]
    scopes = [
        "\n[[scopes]]\n"
        + _line("pattern", pattern)
        + _line("dtype", getattr(dtype, "name", FLOAT8))
        + _emulation_lines(dtype)
        for pattern, dtype in arguments["scopes"]
    ]
    scoped_rules = []
    # Neighbors of one pattern share a table, and no others do: of rules at one depth the last
    # wins, so that the order has to stay.
    for pattern, group in itertools.groupby(arguments["scoped_rules"], key=lambda each: each[0]):
        scoped_rules += ["\n[[scoped_rules]]\n", _line("pattern", pattern)]
        scoped_rules += ["[scoped_rules.rules]\n", *(_rule_line(*each[1:]) for each in group)]
    precisions = [
        "\n[[precisions]]\n" + _line("pattern", pattern) + _line("precision", word)
        for pattern, word in arguments["precisions"]
    ]
    lines = [_HEADER, f"version = {VERSION}\n", _line("rules_version", RULES_VERSION)]
    lines += [_line(name, str(value)) for name, value in options.items() if value is not None]
    recipe = recipe_lines(arguments["matmul"])
    kernels = [_line(name, word) for name, word in arguments["kernels"]]
    storage = [_line(pattern, word) for pattern, word in arguments["storage"]]
    bodies = recipe, kernels, storage, rules, scopes, scoped_rules, precisions
    for heading, body in zip(_HEADINGS, bodies, strict=True):
        if body:
            lines += [heading, *body]
    return "".join(lines)


def _emulation_lines(dtype: Any) -> str:
    """Returns the options of a scope that has a number format, as far as they are not the usual."""
    if not isinstance(dtype, Emulated):
        return ""
    for format in (dtype.format, dtype.gradient):
        if parse(format.name) != format:
            raise TypeError(
                f"Cannot save the policy: {format} is no format that its name means. Pass the name "
                "of one to Emulated, such as 'e4m3'."
            )
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in dtype.changed.items())


def _rule_line(primitive: str, rule: Rule) -> str:
    if isinstance(rule, CastPolicy):
        return _line(primitive, rule.name)
    raise TypeError(
        f"Cannot save the policy: the rule for primitive {primitive!r} is a function, "
        f"{rule_name(rule)} of module {getattr(rule, '__module__', None)!r}, and a policy file "
        "holds only data. Give the primitive a policy's name instead, such as 'FP32', or leave "
        f"the rule out and call register_rule({primitive!r}, ...) in the code that loads the "
        "file."
    )


def _line(key: str, value: str) -> str:
    return f"{_name(key, _quoted)} = {_quoted(value)}\n"


_BARE = re.compile("[A-Za-z0-9_-]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}


def _name(key: str, quoted: Callable[[str], str]) -> str:
    """Returns a key as a file has it: bare where TOML allows that, otherwise in quotes."""
    return key if _BARE.fullmatch(key) else quoted(key)


def _quoted(text: str) -> str:
    if half := _SURROGATE.search(text):
        raise ValueError(
            f"Cannot save the policy: {text!r} holds {half[0]!r}, half of a surrogate pair, "
            "which no TOML file can hold. Remove it from the name or pattern."
        )
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in _ESCAPES or character.isprintable():
        return _ESCAPES.get(character, character)
    # TOML demands this of control characters alone. It is done to all that an editor would not
    # show, or would show as something else: U+202E turns the direction of what follows.
    code = ord(character)
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
    return policy_fields(_as_path(path, "load").read_bytes(), f"Policy file {str(path)!r}")


def policy_fields(content: bytes, start: str) -> dict[str, Any]:
    r"""Returns the arguments of `Policy` that the content of a file holds.

    Args:
        content: What the file holds.
        start: What messages call it, such as "Policy file 'policy.toml'".

    Raises:
        TypeError: A value has the wrong type.
        ValueError: As `read_policy`.

    Example:
        >>> policy_fields(b"version = 1\ncompute_dtype = 'bfloat16'", "The policy")
        {'compute_dtype': 'bfloat16'}
    """
    how = "Compare it with a file that Policy.save writes."
    try:
        # Some editors of Windows put a byte order mark in front, which is no TOML.
        table = tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{start} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Save "
            "it in the encoding UTF-8."
        ) from None
    except RecursionError:
        raise ValueError(
            f"{start} is not a policy: its values are nested too deeply. {how}"
        ) from None
    except ValueError as error:  # also an integer of too many digits
        raise ValueError(f"{start} is not valid TOML: {_clipped(str(error))}. {how}") from None
    # First: a newer file may have keys that are unknown here.
    _check_version(table, start)
    _check_keys(table, ("version", "rules_version", *_READERS), start)
    if "compute_dtype" not in table:
        raise ValueError(f"{start} has no compute_dtype. Add: compute_dtype = 'bfloat16'")
    del table["version"]
    made_with = table.pop("rules_version", RULES_VERSION)
    fields = _fields(table, _READERS, f"{start}: ")
    _warn_of_other_rules(made_with, start)
    _warn_of_misspelled(fields, start)
    return fields


def _check_version(table: Mapping[str, Any], start: str) -> None:
    if "version" not in table:
        raise ValueError(f"{start} has no version. Add the line: version = {VERSION}")
    version, fix = table["version"], f"Write: version = {VERSION}"
    _check_type(version, int, f"{start}: version", "an integer", fix)
    if version > VERSION:
        raise ValueError(
            f"{start} has version {_number(version)}, and this jmp_autocast reads version "
            f"{VERSION}. Upgrade jmp_autocast, or save the policy with this one."
        )
    if version < 1:
        raise ValueError(f"{start} has version {_number(version)}, and the first one is 1. {fix}")


def _warn_of_other_rules(made_with: Any, start: str) -> None:
    """Warns of a policy that was saved under other rules.

    A file without the line asks for the rules that there are: it was written by hand.
    """
    fix = f"Write: rules_version = '{RULES_VERSION}'"
    _check_type(made_with, str, f"{start}: rules_version", "a string", fix)
    if made_with != RULES_VERSION:
        warnings.warn(
            f"{start} was saved under rules {_clipped(made_with)!r}, and this jmp_autocast has "
            f"rules {RULES_VERSION!r}: some equations may have other dtypes. CHANGELOG.md lists "
            "them under 'Dtypes', and `explain` shows those of your program. Then save the policy "
            f"again. {fix}",
            stacklevel=5,
        )


def _warn_of_misspelled(fields: Mapping[str, Any], start: str) -> None:
    """Warns of rules for what looks like a known primitive, misspelled, or like a function.

    A primitive of another package, which is not loaded yet, looks like none of them.
    """
    named = [rule[0] for rule in fields.get("rules", ())]
    named += [rule[1] for rule in fields.get("scoped_rules", ())]
    known = known_primitives()
    for name in dict.fromkeys(named):
        hint = "" if name in known else made_of(name) or did_you_mean(name, known, cutoff=0.8)
        if hint:
            warnings.warn(
                f"{start} has a rule for {_clipped(name)!r}, which is no known primitive: the line "
                f"does nothing.{hint}",
                stacklevel=5,
            )


# From a value of a file, and the place in the file for messages, to what the value means.
_Reader: TypeAlias = Callable[[Any, str], Any]


def _fields(table: Mapping[str, Any], readers: Mapping[str, _Reader], place: str) -> dict[str, Any]:
    """Reads the values of a table, each with the reader of its key."""
    return {key: readers[key](value, f"{place}{key}") for key, value in table.items()}


def _rules(table: Any, where: str) -> tuple[tuple[str, CastPolicy], ...]:
    fix = "Write a line [rules], or [scoped_rules.rules], and lines such as tanh = 'FP32' below it."
    _check_type(table, dict, where, "a table", fix)
    return tuple(
        (name, _rule(name, value, f"{where}.{_clipped(_name(name, repr))}"))
        for name, value in table.items()
    )


def _rule(name: str, value: Any, where: str) -> CastPolicy:
    if not name:
        raise ValueError(f"{where} names no primitive. Write lines such as tanh = 'FP32'.")
    if name in STRUCTURAL:
        raise ValueError(f"{where}: {structural_message(name)}")
    if isinstance(value, dict):
        raise TypeError(
            f"{where} must be a policy's name, got a table. Put quotes around a primitive's name "
            "that has a dot."
        )
    # As in `with_rules`, capitals or not.
    word = value.upper() if isinstance(value, str) else value
    return CastPolicy[_choice(word, where, _POLICIES)]


def _scopes(tables: Any, where: str) -> tuple[tuple[str, Any], ...]:
    fix = "Write a line [[scopes]] above each pattern = '*/LayerNorm_*' with its dtype."
    readers = {"pattern": _pattern, "dtype": _scope_dtype}
    options = dict.fromkeys(_EMULATED, lambda value, where: value)
    found = _array(tables, readers, where, fix, options)
    return tuple(
        (t.pop("pattern"), _emulated(t, t.pop("dtype"), f"{where}[{i}]"))
        for i, t in enumerate(found)
    )


def _scope_dtype(value: Any, where: str) -> Any:
    return parse(value, where) if is_format(value) else _dtype(value, where, _SCOPE_DTYPES)


_EMULATED = tuple(field.name for field in dataclasses.fields(Emulated))[1:]


def _emulated(options: Mapping[str, Any], dtype: Any, where: str) -> Any:
    """Returns the dtype of a scope, or the format with its options."""
    if isinstance(dtype, str) and not options:
        return dtype
    if isinstance(dtype, str):
        raise ValueError(
            f"{where} has {', '.join(options)}, which belong to a number format, and the dtype "
            f"{dtype!r}. Write one such as dtype = 'e4m3', or leave them out."
        )
    try:
        return Emulated(dtype, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def _words(table: Any, where: str, line: str, allowed: Sequence[str]) -> tuple[Any, ...]:
    """Reads a table of names, or patterns, and words."""
    _check_type(table, dict, where, "a table", f"Write a line [{where.split()[-1]}], then {line}.")
    if "" in table:
        raise ValueError(f"{where} has an empty name. Write lines such as {line}.")
    return tuple(
        (name, _choice(word, f"{where}.{_clipped(_name(name, repr))}", allowed))
        for name, word in table.items()
    )


_kernels = functools.partial(_words, line="splash = 'compute'", allowed=KERNEL_WORDS)
_storage = functools.partial(_words, line="'*cache*' = 'compute'", allowed=STORAGE_WORDS)


def _precisions(tables: Any, where: str) -> tuple[tuple[str, str], ...]:
    fix = "Write a line [[precisions]] above each pattern = '*' with its precision."
    readers = {"pattern": _pattern, "precision": functools.partial(_choice, allowed=PRECISIONS)}
    return tuple((t["pattern"], t["precision"]) for t in _array(tables, readers, where, fix))


def _scoped_rules(tables: Any, where: str) -> tuple[tuple[str, str, CastPolicy], ...]:
    fix = (
        "Write a line [[scoped_rules]] above each pattern = '*/head', and below it a line "
        "[scoped_rules.rules] with lines such as tanh = 'FP32'."
    )
    found = _array(tables, {"pattern": _pattern, "rules": _rules}, where, fix)
    return tuple((t["pattern"], *rule) for t in found for rule in t["rules"])


def _array(
    tables: Any,
    readers: Mapping[str, _Reader],
    where: str,
    fix: str,
    options: Mapping[str, _Reader] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """Reads the tables of an array, each of which has every key, and may have the options."""
    _check_type(tables, list, where, "an array of tables", fix)
    for position, table in enumerate(tables):
        here = f"{where}[{position}]"
        _check_type(table, dict, here, "a table", fix)
        _check_keys(table, (*readers, *options), here)
        for key in readers:
            if key not in table:
                raise ValueError(f"{here} has no {key}. {fix}")
        ordered = {key: table[key] for key in (*readers, *options) if key in table}
        yield _fields(ordered, {**readers, **options}, f"{here}.")


def _recipe(table: Any, where: str) -> Float8:
    _check_type(table, dict, where, "a table", "Write a line [matmul], then recipe = 'float8'.")
    try:
        return recipe_of(table)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def _pattern(value: Any, where: str) -> str:
    fix = "Write one such as '*/LayerNorm_*'."
    _check_type(value, str, where, "a string", fix)
    if not value:
        raise ValueError(f"{where} is empty. {fix}")
    return value


def _choice(value: Any, where: str, allowed: Sequence[str]) -> str:
    _check_type(value, str, where, f"a string, one of {', '.join(map(repr, allowed))}")
    check_choice(where, _clipped(value), allowed)
    return value


def _dtype(value: Any, where: str, allowed: Sequence[str] = _FLOATS) -> str:
    is_short = isinstance(value, str) and value in SHORT_NAMES
    return _choice(SHORT_NAMES[value] if is_short else value, where, allowed)


_READERS: dict[str, _Reader] = {
    "compute_dtype": functools.partial(_dtype, allowed=_COMPUTE),
    "output_dtype": _dtype,
    **{name: functools.partial(_choice, allowed=words) for name, words in WORDS.items()},
    "matmul": _recipe,
    "rules": _rules,
    "scopes": _scopes,
    "scoped_rules": _scoped_rules,
    "precisions": _precisions,
    "kernels": _kernels,
    "storage": _storage,
}


def _check_type(value: Any, kind: type, where: str, expected: str, fix: str = "") -> None:
    # A bool is an int to Python, and no number to whoever writes a file.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{where} must be {expected}, got {_shown(value)}. {fix}".rstrip())


def _check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(
                f"{where}: unknown key {_shown(key)}.{did_you_mean(_clipped(key), known)} The keys "
                f"are {', '.join(known)}."
            )


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


def _clipped(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def _as_path(path: Any, method: str) -> pathlib.Path:
    if isinstance(path, str | pathlib.Path):
        return pathlib.Path(path)
    raise wrong_type(
        f"Policy.{method} takes a path, a string or a pathlib.Path",
        path,
        "Write one such as 'policy.toml'.",
    )
