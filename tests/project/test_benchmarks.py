"""The benchmarks run, and count what they say they count."""

import jax
import numpy as np
import pytest

from tests.support.scripts import run_from


@pytest.fixture(scope="module")
def vs_handwritten():
    with run_from("benchmarks", module="vs_handwritten") as script:
        yield script


@pytest.mark.usefixtures("as_users_run_it")
def test_comparison_of_a_tiny_gpt(vs_handwritten, capsys, tmp_path, monkeypatch):
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n")
    monkeypatch.setattr(vs_handwritten, "RESULTS", results)
    variants = ["float32", "hand-written", "ours o1"]
    command = "--tiny --models GPT --seeds 1 --steps 1 --markdown --machine CPU".split()
    found = vs_handwritten.main([*command, "--variants", *variants])["GPT"]
    assert list(found) == variants
    full, hand, ours = found.values()
    assert (full.low_flops, hand.low_flops, ours.low_flops) == (0, 1, 1)
    assert full.casts == ()
    assert full.residuals.nbytes() > 1.3 * hand.residuals.nbytes()
    for low in (hand, ours):
        assert low.mixed_dots == 0
        assert 0 < low.residuals.folded <= low.residuals.nbytes()
        # The transpose of a cast is a cast. The labels' logits have none of their own.
        assert low.cast_count("activation") % 2 == 0
        # Four kernels and the embedding are cast.
        assert low.cast_count("parameter") >= 5
    # By hand, gradients of kernels are rounded and cast; ours are float32 accumulators. Those of
    # biases are small.
    large = [[c for c in m.casts if c.kind == "gradient" and c.nbytes > 1000] for m in (hand, ours)]
    assert len(large[0]) >= 5 > len(large[1])
    # The kernels, embeddings and positions as 16-bit copies; float32 keeps the tied embedding.
    assert hand.residuals.nbytes(parameter=True) == ours.residuals.nbytes(parameter=True)
    for group in ("kernels", "biases", "scales", "embeddings"):
        assert full.errors[group] < 1e-5
        assert 1e-3 < ours.errors[group] < 3e-2
    assert all(seconds >= 0 for m in found.values() for seconds in m.seconds.values())
    assert found["ours o1"].seconds["plan"] > 0
    printed, written = capsys.readouterr().out, results.read_text()
    for text in (printed, written):
        assert all(name in text for name in (*variants, "residuals MB", "torch"))
    assert written.count("<!-- vs_handwritten tiny bfloat16 CPU -->") == 1
    vs_handwritten.tables.write_between_markers(results, "vs_handwritten tiny bfloat16 CPU", "anew")
    assert "residuals MB" not in results.read_text()


@pytest.mark.usefixtures("as_users_run_it")
def test_a_training_of_a_tiny_gpt_learns_alike():
    with run_from("benchmarks", module="train_gpt") as script:
        found = {name: script.train(name, script.TINY, 20, 5) for name in ("float32", "ours o1")}
        text = script.report(found, 20)
    curves = [row["curve"] for row in found.values()]
    assert curves[0] != curves[1]
    np.testing.assert_allclose(*curves, rtol=2e-3)
    assert curves[1][-1] < curves[1][0] - 0.5
    assert text.count("\n| 20 |") == 1


def test_the_pairs_whose_cycles_are_compared_are_programs():
    with run_from("benchmarks", module="tpu_costs") as script:
        for fn, inputs in (program for pair in script.PAIRS.values() for program in pair):
            shapes = [jax.ShapeDtypeStruct(*each) for each in inputs]
            assert jax.eval_shape(fn, *shapes).shape


@pytest.fixture
def training():
    with run_from("benchmarks", module="training.command_line"):
        import training

        yield training


@pytest.mark.usefixtures("as_users_run_it")
def test_training_is_compared_pair_by_pair(training, capsys, tmp_path, monkeypatch):
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n")
    monkeypatch.setattr(training.command_line, "RESULTS", results)
    found = training.command_line.main(["--quick", "--models", "VAE", "--markdown"])["VAE"]
    assert list(found) == ["float32", "by hand, bfloat16", "ours, bfloat16", "ours, float16"]
    full, *low = found.values()
    assert full.losses.shape == (2, 3)
    assert full.scores[0] != full.scores[1]  # two seeds are two trainings
    for outcome in low:
        assert outcome.low_flops == 1
        # The same parameters and batches in each precision: losses differ by rounding alone.
        assert 0 < np.abs(outcome.losses - full.losses).max() < 1e-2 * full.losses.max()
    table = capsys.readouterr().out
    assert all(name in table for name in found)
    assert "| VAE | 3 | training loss |" in results.read_text()
