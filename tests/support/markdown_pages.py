"""The Markdown pages of the project: their fenced blocks, their headings and their links."""

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the file on which the text starts.

    ``follows`` says whether only blank lines stand between it and the block before.
    """

    language: str
    text: str
    line: int
    follows: bool


def markdown_pages():
    """Every page of the site, and those at the top of the repository."""
    docs = [p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts]
    return sorted([*ROOT.glob("*.md"), *docs])


def blocks(text):
    """The fenced blocks of a page, in order."""
    found, end = [], None
    for match in _FENCE.finditer(text):
        follows = end is not None and not text[end : match.start()].strip()
        indent, language, body = match.groups()
        body = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(language.strip(), body, line, follows))
        end = match.end()
    return found


def prose(text):
    """A page without its blocks and its inline code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def links(text):
    """The targets of the links and pictures of a page."""
    return re.findall(r"\]\(<?([^)\s>]+)>?\)", prose(text))


def anchors(text):
    """The anchors of a page, as GitHub and MyST make them from its headings, and explicit ones."""
    outside = _FENCE.sub("", text)
    headings = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
    return {*slugs, *re.findall(r"^\(([\w-]+)\)=$", outside, re.MULTILINE)}
