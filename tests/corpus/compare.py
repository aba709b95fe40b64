"""Comparing two recordings: which programs differ, and where each starts to."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import itertools
import json
import pathlib
import re
from collections.abc import Iterator

from .record import ABOUT, read, recorded_sources

Sections = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Options:
    """How two recordings are compared.

    Args:
        only: A regular expression that ``source: program: section`` matches somewhere.
        common: What only one recording has is no difference.
        lines: How many lines of a difference are printed.
        programs: How many differing programs are printed.
        dtypes: Dtypes alone are compared: another reason is no difference.
    """

    only: str = ""
    common: bool = False
    lines: int = 14
    programs: int = 20
    dtypes: bool = False


def compare(old: pathlib.Path, new: pathlib.Path, options: Options) -> int:
    """Prints what differs between two recordings; returns how many programs do."""
    for folder in (old, new):
        if not (folder / ABOUT).exists():
            raise SystemExit(f"{folder} holds no recording.")
    versions = [json.loads((folder / ABOUT).read_text(encoding="utf-8")) for folder in (old, new)]
    if versions[0] != versions[1]:
        print(f"Recorded by different versions: {versions[0]} and {versions[1]}.")
    compared, different = 0, 0
    titles: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for source in recorded_sources((old, new)):
        before, after = read(old, source), read(new, source)
        for name in dict.fromkeys((*before, *after)):
            pair = _chosen(f"{source}: {name}", before.get(name), after.get(name), options)
            compared += any(pair)
            found = differing(*pair, options.common, options.dtypes)
            if not found:
                continue
            different += 1
            titles.update(title.split()[0] for title in found)
            if options.dtypes:
                lines = (line for texts in found.values() for line in changed_lines(*texts))
                reasons.update(_reason(line) for line in lines if line.startswith("+"))
            if different <= options.programs:
                print("\n".join(_report(f"{source}: {name}", found, options)))
    sections = ", ".join(f"{count} {title}" for title, count in titles.most_common())
    print(f"{different} of {compared} programs differ{f' ({sections})' if sections else ''}.")
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


def _chosen(
    name: str, before: Sections | None, after: Sections | None, options: Options
) -> list[Sections]:
    """The sections of both recordings that the pattern chooses; none of what is missing."""
    if options.common and (before is None or after is None):
        return [{}, {}]
    return [
        {t: text for t, text in (found or {}).items() if re.search(options.only, f"{name}: {t}")}
        for found in (before, after)
    ]


def differing(
    before: Sections,
    after: Sections,
    common: bool = False,
    dtypes: bool = False,
) -> dict[str, tuple[str, str]]:
    """The sections that differ, each as it was and as it is."""
    seen = (lambda text: [*map(_dtypes, text.split("\n"))]) if dtypes else (lambda text: text)
    found = {}
    for title in dict.fromkeys((*before, *after)):
        if common and not (title in before and title in after):
            continue
        old = before.get(title, "not recorded")
        new = after.get(title, "not recorded")
        if seen(old) != seen(new):
            found[title] = old, new
    return found


def _report(name: str, found: dict[str, tuple[str, str]], options: Options) -> Iterator[str]:
    title, (old, new) = next(iter(found.items()))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    yield f"{name}: {title}{others}"
    diff = difflib.unified_diff(old.split("\n"), new.split("\n"), lineterm="", n=2)
    lines = changed_lines(old, new) if options.dtypes else itertools.islice(diff, 2, None)
    for line in itertools.islice(lines, options.lines):
        yield f"    {line[:240]}"
