"""The browser of the tests sees what a page does: its own check."""

import asyncio

import pytest

from tests.support import browser as browser_module

PAGE = "<!doctype html><meta charset=utf-8><link rel=icon href=data:,><title>t</title>"

FAULTS = {
    "an uncaught error": ("<script>missing()</script>", "error: "),
    "a message on the console": ("<script>console.error('no')</script>", "error: no"),
    "a rejected promise": ("<script>Promise.reject(Error('later'))</script>", "later"),
    "a dialog": ("<script>alert('hello')</script>", "dialog: hello"),
    "an image": ("<img src='https://example.com/x.png'>", "request: https://example.com/x.png"),
    "a socket": ("<script>new WebSocket('wss://example.com/s')</script>", "wss://example.com/s"),
    "a frame": ("<iframe src='http://example.com/'></iframe>", "request: http://example.com/"),
    "a missing file": ("<script src='missing.js'></script>", "failed: file:"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(visit, tmp_path, fault):
    text, found = FAULTS[fault]
    (tmp_path / "page.html").write_text(PAGE + text, encoding="utf-8")
    visit(tmp_path / "page.html")
    visit.expect(found)


def test_a_harmless_page_has_no_problems(visit, tmp_path):
    (tmp_path / "page.html").write_text(PAGE + "<p>hello<script>console.log(1)</script>")
    page = visit(tmp_path / "page.html", width=400, height=300)
    assert page.inner_text("p") == "hello"
    assert page.evaluate("[innerWidth, innerHeight]") == [400, 300]
    assert visit.problems == []


def test_other_tests_may_run_event_loops(browser):
    async def answer():
        return 42

    assert asyncio.run(answer()) == 42
    assert browser_module.is_local("file:///x.html")
    assert browser_module.is_local("http://127.0.0.1:8000/")
    assert not browser_module.is_local("https://example.com/localhost")


def test_without_chromium_tests_are_skipped_and_ci_fails(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        browser_module.require_chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="NO CHROMIUM"):
        browser_module.require_chromium()
