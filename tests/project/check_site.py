"""The built site, opened in Chromium from its files: no error, no network, no sideways scrolling.

Not part of the suite, as it needs the site. Build it first::

    python -m sphinx -W -b html docs docs/_build/html
    python -m pytest -n 2 tests/project/check_site.py
"""

import re

import pytest

from tests.support.markdown_pages import ROOT

SITE = ROOT / "docs" / "_build" / "html"
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
GENERATED = ("search.html", "genindex.html")
WIDTHS = (1280, 390)


def html(name):
    return (SITE / name).read_text(encoding="utf-8")


def test_the_site_is_there_and_newer_than_its_sources():
    assert "index.html" in PAGES, f"build it first: {__doc__}"
    sources = [p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts]
    included = {ROOT / "docs" / "measured.md"}
    expected = {p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in sources}
    expected -= {p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in included}
    assert expected <= set(PAGES)
    built = min((SITE / name).stat().st_mtime for name in expected)
    assert max(p.stat().st_mtime for p in sources) <= built, "build it again"


_TABLES_AND_WHAT_IS_CUT = """() => {
    const seen = (selector) =>
        [...document.querySelectorAll(selector)].filter((element) => element.checkVisibility());
    return [
        seen("article table").map((table) => table.getBoundingClientRect().height),
        seen("article .table-wrapper, article pre")
            .filter((box) => box.scrollWidth > box.clientWidth + 1)
            .map((box) => box.innerText),
    ];
}"""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_error_and_does_not_scroll_sideways(name, visit):
    page = visit(SITE / name, WIDTHS[0])
    tables, cut = page.evaluate(_TABLES_AND_WHAT_IS_CUT)
    assert cut == []  # on a phone, tables and code scroll inside their boxes
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("window.scrollTo(1000, 0)")
        assert page.evaluate("window.scrollX") == 0
        assert page.evaluate("document.documentElement.scrollWidth") == width
    if name not in GENERATED:
        assert page.locator("h1").count() == 1
        assert sum(tables) <= 1800, "more than two screens of tables"


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_picture_is_shown_in_the_mode_of_the_page(mode, width, visit):
    page = visit(SITE / "concepts" / "planner.html", width, color_scheme=mode)
    shown = [
        image.get_attribute("src").rpartition("/")[2]
        for image in page.locator(".picture img").all()
        if image.is_visible()
    ]
    assert shown == [f"coloring-{mode}.svg"]
    assert page.evaluate("document.querySelector('.picture img').naturalWidth") > 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("word", "page_found"),
    [("accumulator", "concepts/planner"), ("dynamic_loss_scaling", "reference/loss_scaling")],
)
def test_search_finds_a_word_from_files(word, page_found, width, visit):
    page = visit(f"{(SITE / 'search.html').as_uri()}?q={word}", width)
    results = page.locator("#search-results li a")
    results.first.wait_for()
    page.wait_for_function(
        "!document.querySelector('#search-progress')?.textContent.includes('...')"
    )
    found = [link.get_attribute("href") for link in results.all()]
    assert any(href.partition("#")[0].startswith(f"{page_found}.html") for href in found), found
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_only_its_own_files(name):
    loaded = re.findall(
        r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=\"([^\"]*)\"", html(name)
    )
    outside = [where for where in loaded if re.match(r"(https?:)?//", where)]
    assert not outside
    for where in loaded:
        path = where.partition("?")[0].partition("#")[0]
        if path and not path.startswith("data:"):
            assert ((SITE / name).parent / path).exists(), where
