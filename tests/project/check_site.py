"""The built site, read from its files: links, anchors, pictures, tables, and no network.

Not part of the suite, as it needs the site. Build it first::

    python -m sphinx -W -b html docs docs/_build/html
    python -m pytest -n 2 tests/project/check_site.py
"""

import functools
import re
import urllib.parse

import pytest

from tests.support.html_pages import read_page
from tests.support.markdown_pages import ROOT

SITE = ROOT / "docs" / "_build" / "html"
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))


@functools.cache
def page(name):
    return read_page((SITE / name).read_text(encoding="utf-8"))


def test_the_site_is_there_and_newer_than_its_sources():
    assert "index.html" in PAGES, f"build it first: {__doc__}"
    sources = [p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts]
    expected = {p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in sources}
    assert expected <= set(PAGES)
    built = min((SITE / name).stat().st_mtime for name in expected)
    assert max(p.stat().st_mtime for p in sources) <= built, "build it again"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_only_its_own_files(name):
    loaded = [
        e for tag in ("script", "img", "link", "iframe", "source") for e in page(name).all(tag)
    ]
    for element in loaded:
        for attribute in ("src", "srcset", "href"):
            where = element.attributes.get(attribute) or ""
            assert not re.match(r"(https?:)?//", where), where
            if where and not where.startswith("data:"):
                path = re.split("[?# ]", where)[0]
                assert (SITE / name).parent.joinpath(path).exists(), where


@pytest.mark.parametrize("name", PAGES)
def test_a_link_leads_to_a_place(name):
    for link in page(name).all("a"):
        where = urllib.parse.urlsplit(link.attributes.get("href") or "")
        if where.scheme or where.netloc:
            continue
        path = (SITE / name).parent.joinpath(urllib.parse.unquote(where.path)).resolve()
        target = path if where.path else SITE / name
        assert target.exists(), link.attributes
        if where.fragment and target.suffix == ".html":
            ids = {e.attributes.get("id") for e in page(target.relative_to(SITE).as_posix()).all()}
            assert urllib.parse.unquote(where.fragment) in ids, link.attributes
