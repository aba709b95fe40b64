"""Every example has options, says what it prints, runs with small sizes and leaves a picture."""

import ast
import importlib
import json
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, autocast, explain
from tests.support.examples import EXAMPLES, is_picture, load

ROOT = EXAMPLES.parent
# What other examples import is no example itself.
SHARED = {"char_gpt", "runs"}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in SHARED)
# Those with tests of their own, which run them with small sizes.
ELSEWHERE = {
    "explain_transformer": "test_example_explain",
    "loss_scaling_linen": "test_examples_loss_scaling",
    "loss_scaling_nnx": "test_examples_loss_scaling",
    "loss_scaling_plain": "test_examples_loss_scaling",
    "train_char_transformer": "test_example_char_transformer",
    "train_digits": "test_example_digits",
    "train_sharded": "test_example_sharded",
    "tune_policy": "test_example_tune",
}
# The others: small sizes, and the pictures. float16 is the longest way through each of them.
SMALL = {
    "train_nnx": ("--dtype float16 --steps 12", ["losses.png"]),
    "train_haiku_resnet": ("--dtype float16 --steps 12 --blocks 1 --channels 4", ["losses.png"]),
    "train_neural_ode": (
        "--dtype float16 --steps 12 --width 8 --batch-size 8",
        ["losses.png", "trajectories.png"],
    ),
}

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_every_example_is_tested():
    here = {
        "export_classifier",
        "fused_attention",
        "iterative_refinement",
        "stochastic_rounding",
        "train_float8",
    }
    assert set(NAMES) == {*ELSEWHERE, *SMALL, *here}
    for name, test in ELSEWHERE.items():
        assert f'"{name}"' in (ROOT / "tests" / "project" / f"{test}.py").read_text(
            encoding="utf-8"
        )


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_what_it_is(name, capsys):
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source))
    assert f"python examples/{name}.py" in doc
    assert "It prints" in doc
    assert "float32" in doc
    with pytest.raises(SystemExit) as stop:
        load(name).main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--output" in text
    assert doc.partition("\n")[0][:40] in text


def test_a_page_lists_the_examples():
    text = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"{name}.py" not in text] == []
    assert "tour.ipynb" in text


@pytest.mark.parametrize("name", SMALL)
def test_an_example_trains(name, tmp_path, capsys):
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
    text = capsys.readouterr().out
    assert "12/12" in text  # the progress bar
    assert "float16" in text


@pytest.mark.slow
def test_float8_trains_as_bfloat16_does(tmp_path, capsys):
    options = ["--steps", "6", "--seeds", "2", "--output", str(tmp_path)]
    runs = {run.name: run for run in load("train_float8").main(options)}
    assert [run.losses.shape for run in runs.values()] == [(6, 2)] * 4
    assert runs["float8"].share > 0.5
    # The seeds differ by more than the precisions do, after the same start.
    full, low, least, _ = (run.losses for run in runs.values())
    assert 0 < np.abs(low - full).max() < np.abs(least - full).max() < 0.1
    assert np.abs(full[:, 0] - full[:, 1]).max() > 0
    assert is_picture(tmp_path / "losses.png")
    assert "- float32" in capsys.readouterr().out


def test_an_exported_model_computes_the_same_elsewhere(tmp_path, capsys):
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
    assert "bfloat16" in capsys.readouterr().out


def test_refinement_in_two_dtypes_ends_where_float64_does(tmp_path, capsys):
    example = load("iterative_refinement")
    options = "--size 60 --condition 20 --rounds 5 --steps 20 --output".split()
    double, single, mixed = example.main([*options, str(tmp_path)])
    assert max(double.error, mixed.error) < 1e-14 < 1e-8 < single.error
    assert (double.low_flops, single.low_flops) == (0, 1)
    assert 0.9 < mixed.low_flops < 1
    assert mixed.left[1] < 1e-4 * mixed.left[0]
    assert is_picture(tmp_path / "refinement.png")
    assert "3/3" in capsys.readouterr().out


# --- rules that emit a function --------------------------------------------------------------


def test_one_cast_is_rounded_at_random_and_right_in_the_mean(tmp_path, capsys):
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
    assert "200/200" in capsys.readouterr().out


def test_the_rounding_rule_replaces_one_cast_and_gives_the_same_bits_again():
    example = load("stochastic_rounding")
    fn = autocast(example.update_weights, policy=example.STOCHASTIC)
    stored, update = jnp.ones(64, jnp.bfloat16), jnp.full(64, 1e-3)
    rows = explain(example.update_weights, stored, update, policy=example.STOCHASTIC).rows
    emitted = [row for row in rows if row.reason == "EMIT"]
    assert [(row.scope, row.cause) for row in emitted] == [("store", "round_stochastically")]
    first = fn(stored, update)
    assert len(set(first.tolist())) == 2
    np.testing.assert_array_equal(jax.jit(fn)(stored, update), first)
    special = jnp.array([np.nan, np.inf, -np.inf, 0.0, -1.5])
    rounded = example.round_stochastically(special).astype(jnp.float32)
    np.testing.assert_array_equal(rounded, special)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("stochastic_rounding", "store_rule"), ("fused_attention", "attention_rule")],
)
def test_a_policy_with_a_rule_of_an_example_is_pickled(name, rule, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    policy = BF16.with_rules({"jit": getattr(importlib.import_module(name), rule)})
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_attention_is_replaced(tmp_path, capsys):
    options = "--layers 1 --width 32 --heads 2 --context 64 --batch-size 2 --output".split()
    example = load("fused_attention")
    full, low, fused = example.main([*options, str(tmp_path)])
    assert max(full.errors.values()) < 1e-5
    for result in (low, fused):
        assert result.loss == pytest.approx(full.loss, rel=1e-2)
        assert 1e-5 < max(result.errors.values()) < 0.02
    assert fused.kept < low.kept / 2
    assert is_picture(tmp_path / "attention.png")
    assert "3/3" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        example.main(["--width", "30"])
    assert "--width must be a multiple of --heads" in capsys.readouterr().err


# --- the notebook ---------------------------------------------------------------------------

NOTEBOOK = EXAMPLES / "tour.ipynb"


def test_the_notebook_is_committed_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


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
