"""Every block of code on a page runs, in the order of the page, and prints what the page shows.

A ``python`` block runs in the namespace of its page. What a ``text`` block right after it shows is
what it prints. Other languages do not run: ``bash`` for a shell, ``py`` for programs of libraries
that are not installed here, which have to parse.
"""

import ast

import jax
import pytest

from tests.support.markdown_pages import ROOT, blocks, markdown_pages
from tests.support.page_runner import run_page
from tests.support.processes import environment_without_devices

from .follow_guides import follow

LANGUAGES = {"python", "text", "bash", "toml", "py"}
DIRECTIVES = {
    "{fold-tables}",
    "{picture}",
    "{include}",
    "{literalinclude}",
    "{toctree}",
    "{eval-rst}",
}
NOT_INSTALLED = {"torch", "mpx", "maxtext"}

PAGES = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in markdown_pages()}
WITH_CODE = [name for name, text in PAGES.items() if "```python" in text]
# Keras reads its backend once, and warns where the tests make errors of warnings.
ALONE = ["docs/guides/keras.md"]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("name", sorted(set(WITH_CODE) - set(ALONE)))
def test_the_code_of_a_page_runs_and_prints_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(jax.config.values)
    run_page(PAGES[name], name)
    assert jax.config.values == before, "a page leaves JAX's settings as they are"


@pytest.mark.process
@pytest.mark.parametrize("name", ALONE)
def test_the_code_of_a_page_runs_in_a_process_of_its_own(name):
    quick = environment_without_devices()["XLA_FLAGS"]  # as for the other pages
    status, said = follow(name, settings={"XLA_FLAGS": quick})
    assert not status, said


def test_pages_with_code_are_found():
    assert {"README.md", "docs/index.md", "docs/concepts/planner.md"} <= set(WITH_CODE)


@pytest.mark.parametrize("name", PAGES)
def test_blocks_say_what_they_are(name):
    for block in blocks(PAGES[name]):
        language = block.language.split()[0] if block.language else ""
        assert language in LANGUAGES | DIRECTIVES, f"{name}:{block.line}: {block.language!r}"
        if language == "text":
            assert block.follows, f"{name}:{block.line}: output without a program before it"
        if language == "py":
            modules = imported(block.text)
            assert modules & NOT_INSTALLED, f"{name}:{block.line} can run: call it python"


def imported(source):
    """The first parts of the names that a program imports."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes]
    return {name.partition(".")[0] for name in names}
