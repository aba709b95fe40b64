"""The example that explains a transformer: its summary, its pages, its picture."""

import struct

import pytest

from tests.support.examples import load

TINY = "--layers 1 --width 32 --heads 2 --context 16 --batch-size 2".split()

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.fixture(scope="module")
def example():
    return load("explain_transformer")


def test_it_explains_the_loss_and_the_gradient(example, tmp_path, capsys):
    result = example.main([*TINY, "--output", str(tmp_path / "new" / "report")])
    loss, gradient = result.reports["loss"], result.reports["gradient"]
    assert loss.totals.low_share == gradient.totals.low_share == 1.0
    assert len(gradient.rows) > 2 * len(loss.rows)
    assert loss.totals.residual_nbytes > loss.totals.float32_residual_nbytes > 0
    text = capsys.readouterr().out
    assert loss.summary in text
    assert gradient.summary in text
    assert "explain the gradient" in text or "draw precision.png" in text  # the progress bar
    assert [path.name for path in result.files] == ["loss.html", "gradient.html", "precision.png"]
    for path in result.files:
        assert path.is_file()
        assert str(path) in text
    width, height = struct.unpack(">II", result.files[-1].read_bytes()[16:24])
    assert width == 1440
    assert height > 500


def test_the_pages_open(example, visit, tmp_path):
    result = example.main([*TINY, "--dtype", "float16", "--output", str(tmp_path)])
    page = visit(result.files[1])
    equations = len(result.reports["gradient"].rows)
    assert page.inner_text("#count") == f"{equations} equations"
    names = page.locator("#tree .node-name").all_inner_texts()
    assert {"Gpt", "Block_0", "Dense_0"} <= set(names)
    page.locator("#tree .node", has_text="Dense_0").first.click()
    assert "Block_0 / Dense_0" in page.inner_text("#scope-chip")


def test_modules(example, tmp_path):
    report = example.main([*TINY, "--output", str(tmp_path)]).reports["loss"]
    modules = example.modules_of(report)
    dense = modules["Gpt/Block_0/Dense_0"].by_dtype()
    assert dense["bfloat16"].flops > 0.9 * sum(share.flops for share in dense.values())
    assert "bfloat16" not in modules["Gpt/LayerNorm_0"].by_dtype()
    flops = sum(share.flops for part in modules.values() for share in part.by_dtype().values())
    assert 0.95 * report.totals.flops < flops <= report.totals.flops
