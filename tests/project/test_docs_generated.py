"""Generated pages are up to date, and pages have the figures of the results."""

import importlib

import pytest

from tests.support.markdown_pages import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def docs_on_path(monkeypatch):
    """The modules of docs/ import each other as scripts do."""
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.syspath_prepend(str(DOCS / "tools"))


@pytest.mark.usefixtures("docs_on_path")
@pytest.mark.parametrize("name", ["generate_planner", "generate_primitives"])
def test_a_generated_page_is_up_to_date(name, tmp_path, capsys):
    generator = importlib.import_module(name)
    assert generator.main(["--check"]) == 0, f"run python docs/tools/{name}.py"
    page = tmp_path / "page.md"
    page.write_text("Something else.", encoding="utf-8")
    assert generator.main(["--check"], page) == 1
    assert f"run python docs/tools/{name}.py" in capsys.readouterr().err
    assert generator.main([], page) == 0
    assert generator.main(["--check"], page) == 0


@pytest.mark.usefixtures("docs_on_path")
def test_the_readme_has_the_figures_of_the_results():
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = importlib.import_module("readme_figures").rows()
    assert len(rows) == 4
    assert set(rows) <= set(readme)


@pytest.mark.usefixtures("docs_on_path")
def test_pages_have_the_seconds_of_the_results():
    (table,) = importlib.import_module("results").tables("cpu seconds JAX 0.12")
    columns = "float32", "by hand", "ours", 'ours, level `"compute"`'
    rows = {f"| {p} | {' | '.join(cells[c] for c in columns)} |" for p, cells in table.items()}
    page = (DOCS / "guides" / "cpu.md").read_text(encoding="utf-8")
    _, _, *shown = page.partition("| program | float32 |")[2].partition("\n\n")[0].split("\n")
    assert len(shown) >= 8
    assert set(shown) <= rows
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    gpt = table["GPT, 4 layers, width 512, 8 x 256 tokens: step"]
    cells = [gpt[name].split()[0] for name in ("float32", "by hand", "ours")]
    full, hand, ours = (f"{float(cell):.0f}" for cell in cells)
    assert f"| {full} | {hand} | {ours} |" in readme
