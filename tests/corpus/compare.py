"""Comparing two recordings: which programs differ, and where each starts to."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

from .jaxpr_text import SEPARATOR
from .record import ABOUT, read, recorded_sources

Sections = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Options:
    """How two recordings are compared.

    Args:
        renames: Pairs of words; the first is replaced by the second in the first recording.
        only: A regular expression that ``source: program: section`` matches somewhere.
        common: What only one recording has is no difference.
        lines: How many lines of a difference are printed.
        programs: How many differing programs are printed.
        dtypes: Dtypes alone are compared: another reason is no difference.
    """

    renames: Sequence[tuple[str, str]] = ()
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
    rename = renamer(options.renames)
    compared, different = 0, 0
    titles: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for source in recorded_sources((old, new)):
        before, after = read(old, source), read(new, source)
        for name in dict.fromkeys((*before, *after)):
            pair = _chosen(f"{source}: {name}", before.get(name), after.get(name), options)
            compared += any(pair)
            found = differing(*pair, rename, options.common, options.dtypes)
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


def renamer(renames: Sequence[tuple[str, str]]) -> Callable[[str], str]:
    """Returns the function that replaces whole words of a section."""
    words = dict(renames)
    if not words:
        return lambda text: text
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)")

    def rename(text: str) -> str:
        # Parameters are sorted by name, and a renamed one may have another place.
        lines = pattern.sub(lambda match: words[match[0]], text).split("\n")
        return "\n".join(map(_with_sorted_parameters, lines))

    return rename


def _with_sorted_parameters(line: str) -> str:
    start = line.find(" [")
    if start < 0 or not line.endswith("]") or " = " not in line[:start]:
        return line
    params = sorted(line[start + 2 : -1].split(SEPARATOR))
    return f"{line[: start + 2]}{SEPARATOR.join(params)}]"


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
    rename: Callable[[str], str],
    common: bool = False,
    dtypes: bool = False,
) -> dict[str, tuple[str, str]]:
    """The sections that differ, each as it was and as it is."""
    seen = (lambda text: [*map(_dtypes, text.split("\n"))]) if dtypes else (lambda text: text)
    found = {}
    for title in dict.fromkeys((*before, *after)):
        if common and not (title in before and title in after):
            continue
        old = rename(before[title]) if title in before else "not recorded"
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
