"""Links between pages lead somewhere; links to the outside are well formed."""

import re
import urllib.parse

import pytest

from tests.project.distributions import NOT_IN_SDIST, dead_links
from tests.support.markdown_pages import ROOT, anchors, links, markdown_pages

PAGES = {str(p.relative_to(ROOT)): p for p in markdown_pages()}


def wrong_links(page, text):
    """(target, what is wrong) of each link of a page that is wrong."""
    found = []
    for target in links(text):
        if re.match(r"[a-z][a-z+.-]*:", target):
            if problem := wrong_outside(target):
                found.append((target, problem))
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.is_file():
            found.append((target, "no such file"))
        elif anchor and file.suffix == ".md" and not has_anchor(file, anchor):
            found.append((target, "no such heading"))
    return found


def has_anchor(page, anchor):
    return anchor in anchors(page.read_text(encoding="utf-8"))


def wrong_outside(target):
    parts = urllib.parse.urlsplit(target)
    if parts.scheme == "mailto":
        return "" if "@" in parts.path else "no address"
    if parts.scheme != "https":
        return "not https"
    host = re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.hostname or "")
    return "" if host and not re.search(r"[\s<>\"{}|\\^`]", target) else "malformed"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = PAGES[name]
    assert not wrong_links(page, page.read_text(encoding="utf-8"))


def test_no_page_of_an_sdist_links_to_what_it_lacks():
    folders = ("docs", "examples", "benchmarks", "jmp_autocast", "tests")
    paths = [*ROOT.glob("*"), *(p for name in folders for p in (ROOT / name).rglob("*"))]
    names = {p.relative_to(ROOT).as_posix() for p in paths if p.is_file()}
    files = {name for name in names if not name.startswith(NOT_IN_SDIST)}
    texts = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
    assert not dead_links(texts, files)
    assert dead_links({"docs/a.md": "[a](../.ci/run) [b](https://x.org)"}, files) == [
        "docs/a.md: .ci/run"
    ]
