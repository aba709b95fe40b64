"""What is stored in 16 bits, by the paths of arguments, results and carries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

from .choices import check_choice
from .errors import wrong_type
from .patterns import match_depth

StorageWord = Literal["compute", "declared"]
STORAGE_WORDS: tuple[StorageWord, ...] = get_args(StorageWord)

StorageRules = Sequence[tuple[str, str]]


def check_storage(pattern: object, word: object) -> tuple[str, str]:
    """Returns a rule for what is stored.

    Raises:
        TypeError: The pattern is no string, or empty.
        ValueError: There is no such word.
    """
    if not isinstance(pattern, str) or not pattern:
        fix = "Write one such as '*cache*', or '1/kv'."
        raise wrong_type("What is stored is given by a pattern of paths", pattern, fix)
    check_choice(f"storage[{pattern!r}]", word, STORAGE_WORDS)
    return pattern, str(word)


def is_stored(storage: StorageRules, paths: Iterable[str]) -> bool:
    """Returns whether what has these paths is stored in 16 bits: the last rule that matches says.

    Args:
        storage: The rules of a policy.
        paths: The names that one array goes by.

    Example:
        >>> rules = (("*cache*", "compute"), ("*/scale", "declared"))
        >>> is_stored(rules, ["1/k", "cache/k"]), is_stored(rules, ["cache/scale"])
        (True, False)
    """
    split = [path.split("/") for path in paths]
    words = [
        word for pattern, word in storage if any(match_depth(pattern, p) is not None for p in split)
    ]
    return bool(words) and words[-1] == "compute"


def unmatched_storage(storage: StorageRules, paths: Collection[str]) -> list[str]:
    """Returns the patterns that match none of several paths: most are misspelled.

    Args:
        storage: The rules of a policy.
        paths: The paths of a program.

    Example:
        >>> unmatched_storage((("*cash*", "compute"),), ["cache/k"])
        ['*cash*']
    """
    return [
        pattern
        for pattern, _ in storage
        if all(match_depth(pattern, path.split("/")) is None for path in paths)
    ]
