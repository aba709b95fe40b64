"""The built site, read from its files: links, anchors, pictures, tables, and no network.

Not part of the suite, as it needs the site. Build it first::

    python -m sphinx -W -b html docs docs/_build/html
    python -m pytest -n 2 tests/project/check_site.py
"""

import functools
import json
import re
import urllib.parse

import pytest

from tests.support.html_pages import read_page
from tests.support.markdown_pages import ROOT

SITE = ROOT / "docs" / "_build" / "html"
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
GENERATED = ("search.html", "genindex.html")


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


@pytest.mark.parametrize("name", [name for name in PAGES if name not in GENERATED])
def test_a_page_has_one_title_and_at_most_two_screens_of_tables(name):
    assert len(list(page(name).all("h1"))) == 1
    folded = sum(len(list(fold.all("tr"))) for fold in page(name).all("details"))
    shown = sum(len(list(article.all("tr"))) for article in page(name).all("article")) - folded
    assert shown <= 70, "more than two screens of tables"


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


def test_a_picture_is_there_in_both_modes():
    shown = [img.attributes["src"] for img in page("concepts/planner.html").all("img")]
    names = {where.rpartition("/")[2] for where in shown}
    assert {"coloring-light.svg", "coloring-dark.svg"} <= names


@pytest.mark.parametrize(
    ("word", "found"),
    [("accumul", "concepts/planner"), ("dynamic_loss_sc", "reference/loss_scaling")],
)
def test_the_index_of_the_search_has_a_word(word, found):
    text = (SITE / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    terms = [*index["terms"].items(), *index["titleterms"].items()]
    found_in = [where for term, where in terms if term.startswith(word)]
    numbers = {n for where in found_in for n in ([where] if isinstance(where, int) else where)}
    assert found in {index["docnames"][n] for n in numbers}
