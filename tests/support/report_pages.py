"""What the tests of HTML reports share: opening the page of a report, and looking at it."""

import pytest


@pytest.fixture(name="show")
def page_opener(visit, tmp_path):
    """Opens the page of a report."""

    def open_page(report, address="", **options):
        path = tmp_path / "report.html"
        assert report.to_html(path) == path.read_text(encoding="utf-8")
        return visit(path.as_uri() + address, **options)

    return open_page


def count(page):
    return page.inner_text("#count")


def fits(page):
    """No part of the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")
