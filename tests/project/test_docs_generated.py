"""Generated pages are up to date, and pictures are the same each time they are drawn."""

import importlib
import re

import numpy as np
import pytest

from jmp_autocast import BF16, explain
from tests.support.markdown_pages import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def docs_on_path(monkeypatch):
    """The modules of docs/ import each other as scripts do."""
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.syspath_prepend(str(DOCS / "tools"))


@pytest.mark.usefixtures("docs_on_path")
@pytest.mark.parametrize(
    "name", ["generate_block", "generate_planner", "generate_primitives", "generate_results"]
)
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
def test_the_block_has_each_equation_of_explain():
    generator = importlib.import_module("generate_block")
    block = importlib.import_module("transformer_block")
    report = explain(block.block, *block.shapes(), policy=BF16)
    text = generator.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d* \| `(\w+)` \|.*\| `(\w+)`", text, re.MULTILINE)
    assert rows == [(row.primitive, row.reason) for row in report.rows]


@pytest.mark.usefixtures("docs_on_path")
def test_results_are_read_as_they_stand():
    results = importlib.import_module("results")
    text = results.RESULTS.read_text(encoding="utf-8")
    models = results.handwritten("vs_handwritten full bfloat16 2-core CPU")
    assert [name.partition(":")[0] for name in models] == ["GPT", "ViT", "ResNet", "LSTM"]
    cell = models[next(iter(models))]["Memory"]["float32"]["residuals MB"]
    assert f"| float32 | {cell} |" in text
    with pytest.raises(LookupError, match="no results of 'nothing'"):
        results.section("nothing")


@pytest.mark.usefixtures("docs_on_path")
def test_the_readme_has_the_figures_of_the_results():
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = importlib.import_module("generate_results").rows()
    assert len(rows) == 4
    assert set(rows) <= set(readme)


PICTURES = {"flow", "coloring", "training", "memory", "compilers"}


@pytest.mark.usefixtures("docs_on_path", "as_users_run_it")
def test_pictures_are_the_same_each_time(tmp_path):
    drawing = importlib.import_module("figures.draw")
    assert set(drawing.PICTURES) == PICTURES
    drawing.write_all(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {f"{name}-{mode}.svg" for name in PICTURES for mode in ("light", "dark")}
    style = drawing.MODES[0]
    for name, module in drawing.PICTURES.items():
        path = tmp_path / f"{name}-{style.name}.svg"
        first = path.read_bytes()
        with drawing.styled(style):
            drawing.save(module.draw(module.data(), style), name, style, tmp_path)
        assert path.read_bytes() == first, name


@pytest.mark.usefixtures("docs_on_path")
def test_the_picture_of_the_readme(tmp_path):
    drawing, dtypes = (importlib.import_module(f"figures.{name}") for name in ("draw", "dtypes"))
    arguments = dtypes.weights(), dtypes.batch(0)
    totals = explain(dtypes.loss, *arguments, policy=dtypes.FLOAT8).totals
    # Two of eight products are those of attention, which have no weight.
    assert totals.low_share == 1.0
    assert totals.float8_share > 0.8
    names = "float32", "bfloat16", "float16", "float8"
    found = {name: dtypes.Training(np.linspace(4.0, 1.0, 9), 2_000_000, 500_000) for name in names}
    with drawing.styled(drawing.MODES[0]):
        drawing.save(dtypes.draw(found, drawing.MODES[0]), "drawn", drawing.MODES[0], tmp_path)
    assert (tmp_path / "drawn-light.svg").stat().st_size > 10_000
    assert {p.name for p in (DOCS / "_static").glob("*.svg")} == {
        f"dtypes-{mode.name}.svg" for mode in drawing.MODES
    }


def test_every_picture_is_on_a_page_and_has_a_text_for_those_who_do_not_see_it():
    pages = "".join(p.read_text(encoding="utf-8") for p in sorted(DOCS.rglob("*.md")))
    found = re.findall(r"^```\{picture\} (\w+)\n:alt: (.{20,})$", pages, re.MULTILINE)
    assert {name for name, _ in found} == PICTURES
