"""Every example has options, says what it prints, runs with small sizes and leaves a picture."""

import ast
import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

from jmp_autocast import Policy, skipped_steps
from jmp_autocast.loss_scaling import loss_scale
from tests.support.examples import EXAMPLES, is_picture, load

ROOT = EXAMPLES.parent
# What other examples import is no example itself.
SHARED = {"char_gpt", "runs"}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in SHARED)
# Small sizes, and the pictures. float16 is the longest way through each of them.
SMALL = {
    "train_nnx": ("--dtype float16 --steps 12", ["losses.png"]),
    "train_haiku_resnet": ("--dtype float16 --steps 12 --blocks 1 --channels 4", ["losses.png"]),
    "train_neural_ode": (
        "--dtype float16 --steps 12 --width 32 --batch-size 8",
        ["losses.png", "trajectories.png"],
    ),
}
TINY = "--layers 1 --width 32 --heads 2".split()
TINY_GPT = [*TINY, *"--context 32 --batch-size 16 --learning-rate 1e-2".split()]

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_every_example_is_tested():
    here = ast.walk(ast.parse((ROOT / "tests/project/test_examples.py").read_text("utf-8")))
    assert set(NAMES) <= {node.value for node in here if isinstance(node, ast.Constant)}


def test_a_page_lists_the_examples():
    text = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"{name}.py" not in text] == []
    assert "tour.ipynb" in text


@pytest.mark.slow
def test_digits_train_in_16_bits_as_far_as_in_float32(tmp_path):
    full, *low = load("train_digits").main(["--steps", "66", "--output", str(tmp_path)])
    assert is_picture(tmp_path / "losses.png")
    assert (full.dtype, full.low_flops, full.skipped_steps) == ("float32", 0, 0)
    assert full.score > 0.9
    assert [run.dtype for run in low] == ["bfloat16", "float16"]
    for run in low:
        assert (run.low_flops, run.skipped_steps) == (1, 0)
        assert abs(run.score - full.score) <= 0.015
        assert run.loss == pytest.approx(full.loss, rel=0.05)


@pytest.mark.slow
def test_float16_learns_as_float32_and_without_loss_scaling_worse(tmp_path):
    # With batches of 512 characters, a weight of 1e-4 stands for batches of 5 million.
    shared = [*TINY_GPT, "--steps", "40", "--loss-weight", "1e-4", "--growth-interval", "15"]
    runs = {
        "full": ["--dtype", "float32"],
        "half": ["--dtype", "float16"],
        "unscaled": ["--dtype", "float16", "--loss-scaling", "none"],
    }
    full, half, unscaled = (
        load("train_char_transformer").main([*shared, *more, "--output", str(tmp_path / name)])
        for name, more in runs.items()
    )
    assert (full.loss_scaling, half.loss_scaling) == ("none", "dynamic")
    assert (full.low_flops, half.low_flops, unscaled.low_flops) == (0, 1, 1)
    assert set(full.scales) == set(unscaled.scales) == {1.0}
    assert (half.scales[14], half.scales[15]) == (2.0**16, 2.0**17)
    for name in ("train_loss", "validation_loss"):
        expected, actual = getattr(full, name), getattr(half, name)
        assert expected < full.unigram_entropy
        assert actual == pytest.approx(expected, rel=0.02)
        assert actual != expected
        assert getattr(unscaled, name) > 1.1 * expected
    assert is_picture(tmp_path / "half" / "curve.png")
    assert json.loads((tmp_path / "half" / "result.json").read_text())["losses"] == half.losses


def on_a_short_text(name):
    """The example with a validation text of a few batches; the whole one has a hundred."""
    example = load(name)
    text = example.load_text()
    example.load_text = lambda: text._replace(validation=text.validation[:2100])
    return example


@pytest.mark.slow
def test_a_model_that_is_split_over_devices_trains_as_on_one(tmp_path, capsys):
    sizes = "--layers 1 --width 16 --heads 2 --context 32 --batch-size 32 --learning-rate 1e-2"
    options = [*sizes.split(), *"--steps 6 --growth-interval 2".split(), "--output"]
    one = on_a_short_text("train_char_transformer").main([*options, str(tmp_path / "one")])
    split = on_a_short_text("train_sharded").main(
        [*options, str(tmp_path / "split"), "--fsdp", "2"]
    )
    assert "8 devices in 1 processes: {'data': 4, 'fsdp': 2}" in capsys.readouterr().out
    assert (split.scales, split.skipped_steps, split.low_flops) == (one.scales, 0, 1)
    # Sums over devices are added in another order.
    np.testing.assert_allclose(split.losses, one.losses, rtol=1e-3)
    assert split.validation_loss == pytest.approx(one.validation_loss, rel=1e-3)


def test_a_tuned_policy_trains_where_float16_fails(tmp_path):
    options = "--blocks 2 --loud 1 --width 8 --batch-size 8 --steps 40 --output".split()
    result = load("tune_policy").main([*options, str(tmp_path / "new" / "folder")])
    assert {each.scope for each in result.report.kept} == {"block_1/gate"}
    assert result.report.error_before == math.inf
    policy, picture = result.files
    assert Policy.load(policy) == result.report.policy
    assert not np.isfinite(result.losses["float16"]).any()
    full, tuned = result.losses["float32"], result.losses["tuned"]
    assert np.mean(full[-5:]) < 0.8 * np.mean(full[:5])
    # The first scales of the loss may be too large for a step or two.
    assert result.skipped["tuned"] <= 2 < result.skipped["float16"] == 40
    assert np.mean(tuned[-5:]) == pytest.approx(np.mean(full[-5:]), rel=0.2)
    assert is_picture(picture)


@pytest.mark.parametrize("name", ["loss_scaling_linen", "loss_scaling_nnx"])
def test_loss_scaling_of_flax(name, capsys, tmp_path):
    accuracy, state = load(name).main(["--output", str(tmp_path)])
    assert accuracy > 0.9
    assert (skipped_steps(state), loss_scale(state)) == (1, 2.0**18)
    assert "1 of 200 steps skipped" in capsys.readouterr().out
    if name == "loss_scaling_linen":
        leaves = jax.tree.leaves((state.params, state.batch_stats))
        assert all(np.all(np.isfinite(leaf)) for leaf in leaves)


def test_a_transformer_is_explained(tmp_path):
    example = load("explain_transformer")
    options = [*TINY, *"--context 16 --batch-size 2 --output".split()]
    result = example.main([*options, str(tmp_path / "new" / "report")])
    loss, gradient = result.reports["loss"], result.reports["gradient"]
    assert loss.totals.low_share == gradient.totals.low_share == 1.0
    assert len(gradient.rows) > 2 * len(loss.rows)
    assert loss.totals.residual_nbytes > loss.totals.float32_residual_nbytes > 0
    assert [path.name for path in result.files] == ["loss.html", "gradient.html", "precision.png"]
    assert all(path.is_file() for path in result.files)
    assert is_picture(result.files[-1])
    modules = example.modules_of(loss)
    dense = modules["Gpt/Block_0/Dense_0"].by_dtype()
    assert dense["bfloat16"].flops > 0.9 * sum(share.flops for share in dense.values())
    assert "bfloat16" not in modules["Gpt/LayerNorm_0"].by_dtype()
    flops = sum(share.flops for part in modules.values() for share in part.by_dtype().values())
    assert 0.95 * loss.totals.flops < flops <= loss.totals.flops


@pytest.mark.parametrize("name", SMALL)
def test_an_example_trains(name, tmp_path):
    options, pictures = SMALL[name]
    (run,) = load(name).main([*options.split(), "--output", str(tmp_path)])
    assert (run.dtype, len(run.losses)) == ("float16", 12)
    good = np.array(run.losses)[np.isfinite(run.losses)]
    assert len(good) >= 12 - run.skipped_steps
    assert good[-3:].mean() < good[:3].mean()
    assert np.isfinite(run.score)
    # diffrax asks for float32 in the sums of its stages, and differentiates each example by itself:
    # the weights' gradients are outer products there, which sum nothing and stay float32.
    assert run.low_flops > (0.7 if name == "train_neural_ode" else 0.99)
    assert all(is_picture(tmp_path / picture) for picture in pictures)


@pytest.mark.slow
def test_float8_trains_as_bfloat16_does(tmp_path):
    options = ["--steps", "6", "--seeds", "2", "--output", str(tmp_path)]
    runs = {run.name: run for run in load("train_float8").main(options)}
    assert [run.losses.shape for run in runs.values()] == [(6, 2)] * 4
    assert runs["float8"].share > 0.5
    # The seeds differ by more than the precisions do, after the same start.
    full, low, least, _ = (run.losses for run in runs.values())
    assert 0 < np.abs(low - full).max() < np.abs(least - full).max() < 0.1
    assert np.abs(full[:, 0] - full[:, 1]).max() > 0
    assert is_picture(tmp_path / "losses.png")


@pytest.mark.slow
def test_an_exported_model_computes_the_same_elsewhere(tmp_path):
    results = load("export_classifier").main(["--epochs", "1", "--output", str(tmp_path)])
    assert [result.dtype for result in results] == ["float32", "bfloat16", "float16"]
    full, *low = results
    assert full.difference < 1e-5
    for result, tolerance in zip(low, (0.05, 0.005), strict=True):
        assert 0 < result.difference < tolerance
        assert result.agreement > 0.98
        assert result.report.totals.low_share == 1
        assert result.probabilities.dtype == "float32"
    assert is_picture(tmp_path / "export.png")


def test_one_cast_is_rounded_at_random_and_right_in_the_mean(tmp_path):
    example = load("stochastic_rounding")
    options = ["--steps", "200", "--weights", "512", "--output", str(tmp_path)]
    full, nearest, random = example.main(options)
    moved = 200 * example.UPDATE
    assert abs(full.errors.mean()) < 1e-3 * moved
    assert nearest.errors.mean() == pytest.approx(-moved, rel=1e-2)  # not one update arrived
    # The standard error of the mean of 512 weights, each of which is off by 0.011.
    assert abs(random.errors.mean()) < 4 * random.errors.std() / np.sqrt(512) < moved / 8
    assert [result.derivative for result in (full, nearest, random)] == [1, 1, 1]
    assert is_picture(tmp_path / "rounding.png")


def test_attention_is_replaced(tmp_path):
    options = "--layers 1 --width 32 --heads 2 --context 64 --batch-size 2 --output".split()
    example = load("fused_attention")
    full, low, fused = example.main([*options, str(tmp_path)])
    assert max(full.errors.values()) < 1e-5
    for result in (low, fused):
        assert result.loss == pytest.approx(full.loss, rel=1e-2)
        assert 1e-5 < max(result.errors.values()) < 0.02
    assert fused.kept < low.kept / 2
    assert is_picture(tmp_path / "attention.png")


NOTEBOOK = EXAMPLES / "tour.ipynb"


def test_the_notebook_is_committed_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@pytest.mark.process
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    command = [sys.executable, "-m", "tests.support.run_notebook", NOTEBOOK]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert not done.returncode, done.stderr
    outputs = [output for cell in json.loads(done.stdout) for output in cell]
    data = [output["data"] for output in outputs if "data" in output]
    assert sum("image/png" in kinds for kinds in data) == 2
    assert any("<iframe" in "".join(kinds.get("text/html", "")) for kinds in data)
    printed = "".join(output.get("text", "") for output in outputs)
    assert "exact 40.96, autocast 40.96, cast by hand 4.00" in printed
    assert not any(output["output_type"] == "error" for output in outputs)
