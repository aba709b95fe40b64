"""The browser of the tests sees what a page does: its own check."""

import asyncio
import http.server
import threading

import pytest

from tests.support import browser as browser_module

PAGE = "<!doctype html><meta charset=utf-8><link rel=icon href=data:,><title>t</title>"

FAULTS = {
    "an uncaught error": ("<script>missing()</script>", "error: "),
    "a message on the console": ("<script>console.error('no')</script>", "error: no"),
    "a warning": ("<script>console.warn('careful')</script>", "warning: careful"),
    "a rejected promise": ("<script>Promise.reject(Error('later'))</script>", "later"),
    "a dialog": ("<script>alert('hello')</script>", "dialog: hello"),
    "an image": ("<img src='https://example.com/x.png'>", "request: https://example.com/x.png"),
    "a fetch": ("<script>fetch('http://10.0.0.1/')</script>", "request: http://10.0.0.1/"),
    "a socket": ("<script>new WebSocket('wss://example.com/s')</script>", "wss://example.com/s"),
    "a font": (
        "<style>@font-face{font-family:f;src:url(https://example.com/f)}p{font:9px f}</style><p>x",
        "request: https://example.com/f",
    ),
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


def test_this_machine_may_be_asked(visit):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert visit(f"http://127.0.0.1:{server.server_port}/").title() == "t"
        finally:
            server.shutdown()
            thread.join()


def test_other_tests_may_run_event_loops(browser):
    async def answer():
        return 42

    assert asyncio.run(answer()) == 42
    assert browser_module.is_local("file:///x.html")
    assert not browser_module.is_local("https://example.com/localhost")


def test_without_chromium_tests_are_skipped_and_ci_fails(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        browser_module.require_chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="NO CHROMIUM"):
        browser_module.require_chromium()
