"""Comparing two recordings: which programs differ, and where each starts to."""

from __future__ import annotations

import collections
import difflib
import itertools
import json
import pathlib
from collections.abc import Iterator

from .record import ABOUT, read, recorded_sources

Sections = dict[str, str]
LINES = 14
"""Of each difference so many are printed."""


def compare(old: pathlib.Path, new: pathlib.Path, programs: int = 20) -> int:
    """Prints which programs change their dtypes, the first with lines; returns how many do."""
    for folder in (old, new):
        if not (folder / ABOUT).exists():
            raise SystemExit(f"{folder} holds no recording.")
    versions = [json.loads((folder / ABOUT).read_text(encoding="utf-8")) for folder in (old, new)]
    if versions[0] != versions[1]:
        print(f"Recorded by different versions: {versions[0]} and {versions[1]}.")
    compared, different = 0, 0
    reasons: collections.Counter[str] = collections.Counter()
    for source in recorded_sources((old, new)):
        before, after = read(old, source), read(new, source)
        for name in dict.fromkeys((*before, *after)):
            compared += 1
            found = differing(before.get(name, {}), after.get(name, {}))
            if not found:
                continue
            different += 1
            lines = (line for texts in found.values() for line in changed_lines(*texts))
            reasons.update(_reason(line) for line in lines if line.startswith("+"))
            if different <= programs:
                print("\n".join(_report(f"{source}: {name}", found)))
    print(f"{different} of {compared} programs differ.")
    if reasons:
        print("Why:", ", ".join(f"{reason} {n}" for reason, n in reasons.most_common()))
    return different


def _dtypes(line: str) -> str:
    """A line of a plan without its reason."""
    return line.partition(" | ")[0]


def _reason(line: str) -> str:
    return line.split("|")[1].strip() if "|" in line else line


def changed_lines(old: str, new: str) -> Iterator[str]:
    """The lines of a plan whose dtypes changed, with their reasons: ``-`` before, ``+`` after."""
    lines = old.split("\n"), new.split("\n")
    keys = [[_dtypes(line) for line in each] for each in lines]
    matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "equal":
            yield from (f"-{line}" for line in lines[0][i:j])
            yield from (f"+{line}" for line in lines[1][k:m])


def differing(before: Sections, after: Sections) -> dict[str, tuple[str, str]]:
    """The sections whose dtypes differ, each as it was and as it is."""
    dtypes = lambda text: [*map(_dtypes, text.split("\n"))]
    found = {}
    for title in dict.fromkeys((*before, *after)):
        old, new = (each.get(title, "not recorded") for each in (before, after))
        if dtypes(old) != dtypes(new):
            found[title] = old, new
    return found


def _report(name: str, found: dict[str, tuple[str, str]]) -> Iterator[str]:
    title, texts = next(iter(found.items()))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    yield f"{name}: {title}{others}"
    for line in itertools.islice(changed_lines(*texts), LINES):
        yield f"    {line[:240]}"
