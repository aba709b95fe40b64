"""Pages in a real headless Chromium, for tests: what runs on them, and what they ask of a network.

A test that takes the fixture `visit` runs in the browser's thread. Playwright's synchronous API
keeps an event loop running in its thread, in which `asyncio.run` would fail from then on: Orbax
uses it. There is one browser per process, started by the first test that needs it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "NO CHROMIUM: pages are NOT tested. Install it (Debian: apt-get install chromium), or put one "
    f"of {', '.join(NAMES)} on PATH."
)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--disable-gpu",  # there is none; without the process for it a page opens in 2/3 of the time
)


def find_chromium() -> str | None:
    """Returns the path of Chromium, None where none is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def require_chromium() -> str:
    """Returns the path of Chromium; without it skips the test, or fails it where ``CI`` is set."""
    found = find_chromium()
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(MISSING)
    return found


def is_local(url: str) -> bool:
    """True for a URL that asks nothing of a network: a file, data, or this machine."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ("file", "data", "blob", "about") or parts.hostname in _LOOPBACK


@dataclasses.dataclass
class Visits:
    """The pages that one test has opened; call it with a file or URL to open one.

    Args:
        browser: Playwright's browser.
        problems: What went wrong on the pages: messages on the console, uncaught errors, dialogs,
            requests that are not local (they are refused) and those that failed. The test fails
            if there is one at its end.
        expected: True for a test that has waited for a problem.
    """

    browser: Any
    problems: list[str] = dataclasses.field(default_factory=list)
    contexts: list[Any] = dataclasses.field(default_factory=list)
    expected: bool = False

    def __call__(
        self, where: str | pathlib.Path, width: int = 1280, height: int = 800, **options: Any
    ) -> Any:
        """Opens a file or URL; options are those of `Browser.new_context`."""
        size: Any = {"width": width, "height": height}
        context = self.browser.new_context(viewport=size, **options)
        self.contexts.append(context)
        context.route("**/*", self._route)
        context.route_web_socket("**/*", self._refuse_socket)
        context.on("console", self._hear)
        context.on("weberror", lambda error: self._note(f"error: {error.error}"))
        context.on("requestfailed", lambda request: self._note(f"failed: {request.url}"))
        context.on("dialog", self._dismiss)
        page = context.new_page()
        page.goto(where.resolve().as_uri() if isinstance(where, pathlib.Path) else where)
        return page

    def _note(self, problem: str) -> None:
        self.problems.append(problem)

    def _route(self, route: Any) -> None:
        if is_local(route.request.url):
            route.continue_()
        else:
            self._note(f"request: {route.request.url}")
            route.abort()

    def _refuse_socket(self, socket: Any) -> None:
        self._note(f"request: {socket.url}")
        socket.close()

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self._note(f"{message.type}: {message.text}")

    def _dismiss(self, dialog: Any) -> None:
        self._note(f"dialog: {dialog.message}")
        dialog.dismiss()

    def expect(self, text: str, seconds: float = 20.0) -> None:
        """Waits for a problem that contains `text`; problems do not fail this test any more.

        Chromium reports from processes of their own, so a problem comes after what made it, and
        another one with it.
        """
        self.expected = True
        page = self.contexts[-1].pages[0]
        deadline = time.monotonic() + seconds
        while not any(text in problem for problem in self.problems):
            if time.monotonic() > deadline:
                pytest.fail(f"No problem with {text!r} in {seconds:g} s, only: {self.problems}")
            page.wait_for_timeout(20)

    def close(self) -> None:
        """Closes the pages of the test."""
        for context in self.contexts:
            context.close()


def _start(chromium: str) -> tuple[Any, Any]:
    from playwright.sync_api import sync_playwright

    playwright = sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=chromium, args=_ARGUMENTS)
    return playwright, browser


@pytest.fixture(scope="session")
def browser_thread() -> Iterator[Callable[..., Any]]:
    """Calls a function in the browser's thread, and returns its result."""
    with concurrent.futures.ThreadPoolExecutor(1, "browser") as executor:
        yield lambda fn, *args, **kwargs: executor.submit(fn, *args, **kwargs).result()


@pytest.fixture(scope="session")
def browser(browser_thread: Any) -> Iterator[Any]:
    """Chromium; see `require_chromium` for what happens without it."""
    chromium = require_chromium()
    playwright, browser = browser_thread(_start, chromium)
    yield browser
    browser_thread(browser.close)
    browser_thread(playwright.stop)


@pytest.fixture
def visit(browser: Any, browser_thread: Any) -> Iterator[Visits]:
    """Opens pages; the test that asks for it runs in the browser's thread."""
    visits = Visits(browser)
    yield visits
    browser_thread(visits.close)
    if visits.problems and not visits.expected:
        pytest.fail("\n".join(["The pages of the test have problems:", *visits.problems]))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Runs the tests that take `visit` in the browser's thread."""
    if "visit" not in pyfuncitem.fixturenames:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    pyfuncitem.funcargs["browser_thread"](pyfuncitem.obj, **arguments)
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says loudly that pages were not tested."""
    reports = terminalreporter.getreports("skipped")
    if skipped := sum(MISSING in str(report.longrepr) for report in reports):
        terminalreporter.write_line(f"{skipped} tests skipped. {MISSING}", red=True, bold=True)
