"""The transformer example: what loss scaling does for it, and that a kill costs it nothing."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jmp_autocast import autocast, scaled_value_and_grad
from tests.support.examples import EXAMPLES, load

TINY = "--layers 1 --width 32 --heads 2 --context 32 --batch-size 16 --learning-rate 1e-2".split()


@pytest.fixture(scope="module")
def example():
    return load("train_char_transformer")


pytestmark = pytest.mark.usefixtures("as_users_run_it")


# --- what loss scaling is for ---------------------------------------------------------------


def test_float16_learns_as_float32_and_without_loss_scaling_worse(example, tmp_path):
    # With batches of 512 characters, a weight of 1e-4 stands for batches of 5 million.
    shared = [*TINY, "--steps", "40", "--loss-weight", "1e-4", "--growth-interval", "15"]
    runs = {
        "full": ["--dtype", "float32"],
        "half": ["--dtype", "float16"],
        "unscaled": ["--dtype", "float16", "--loss-scaling", "none"],
    }
    results = {
        name: example.main([*shared, *options, "--output", str(tmp_path / name)])
        for name, options in runs.items()
    }
    full, half, unscaled = (results[name] for name in runs)
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
    picture = (tmp_path / "half" / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert json.loads((tmp_path / "half" / "result.json").read_text())["losses"] == half.losses


def test_gradients_below_the_smallest_float16_vanish_without_loss_scaling(example):
    text = example.load_text()
    model = example.Gpt(text.vocabulary, layers=1, width=32, heads=2)
    windows = example.batch_at(text.train, 16, 32, seed=0, step=0)
    params = jax.jit(model.init)(jax.random.key(0), windows[:, :-1])["params"]

    def gradient(dtype, scale):
        loss = example.make_loss(model, weight=5e-7)
        loss = autocast(loss, compute_dtype=dtype, enabled=dtype != "float32")
        grads = jax.jit(scaled_value_and_grad(loss, has_aux=True))(scale, params, windows)
        kernel = grads[1]["Block_0"]["Dense_0"]["kernel"]
        return np.asarray(kernel, np.float64) / scale

    exact = gradient("float32", 1.0)
    assert 0 < np.max(np.abs(exact)) < 2.0**-24  # 6e-8, the smallest number in float16
    assert not gradient("float16", 1.0).any()
    scaled = gradient("float16", 2.0**16)
    assert np.linalg.norm(scaled - exact) < 0.01 * np.linalg.norm(exact)


# --- kill and resume ------------------------------------------------------------------------


def run_until_killed(arguments, step, compiled):
    """Runs the example and kills it when it says that it has done a step."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),  # each program is compiled once
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "train_char_transformer.py", *arguments, "--log-every", "1"],
        env=environment,
        stdout=subprocess.PIPE,
        bufsize=0,
        pipesize=4096,  # some 100 lines, so that it cannot run on to its end
    )
    seen = []
    for line in process.stdout:
        if line.startswith(b"step"):
            seen.append(int(line.split()[1]))
            if seen[-1] >= step:
                process.send_signal(signal.SIGKILL)
                break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    return seen


@pytest.mark.process
def test_killed_and_resumed_run_ends_in_the_same_bits(example, tmp_path):
    arguments = [*TINY, "--steps", "160", "--growth-interval", "15"]
    whole = example.main([*arguments, "--output", str(tmp_path / "a")])
    assert whole.skipped_steps > 0

    killed = [*arguments, "--output", str(tmp_path / "b")]
    # The second checkpoint waits for the first to be complete.
    assert run_until_killed([*killed, "--checkpoint-every", "7"], 15, tmp_path / "c")[0] == 1
    # With one at each step, the kill comes while one is written.
    often = [*killed, "--resume", "--checkpoint-every", "1"]
    again = run_until_killed(often, 20, tmp_path / "c")
    assert (again[0] - 1) % 7 == 0
    assert 7 < again[0] < 20
    assert example.main([*killed, "--resume"]) == whole

    results = [(tmp_path / run / "result.json").read_bytes() for run in "ab"]
    assert results[0] == results[1]
    states = []
    for run in "ab":
        with example.checkpoints(tmp_path / run) as manager:
            assert manager.latest_step() == 160
            saved = manager.restore(
                160, args=example.ocp.args.Composite(state=example.ocp.args.StandardRestore())
            )
        states.append(jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), saved["state"]))
    assert states[0] == states[1]


def test_resume_before_the_first_checkpoint_and_after_the_last(example, tmp_path, capsys):
    arguments = [*TINY, "--steps", "4", "--resume", "--output", str(tmp_path)]
    first = example.main(arguments)
    assert "step    4" in capsys.readouterr().out
    assert example.main(arguments) == first
    assert "step    4" not in capsys.readouterr().out

    with pytest.raises(SystemExit, match="pass --resume or another --output"):
        example.main([a for a in arguments if a != "--resume"])
    with pytest.raises(SystemExit, match="other options"):
        example.main([*arguments, "--seed", "1"])


# --- data and options -----------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_alone(example):
    text = example.load_text()
    assert len(text.train) > 400_000
    assert len(text.validation) == pytest.approx(len(text.train) / 9, rel=1e-4)
    assert 50 < text.vocabulary == max(text.train.max(), text.validation.max()) + 1

    def batch(seed, step):
        return example.batch_at(text.train, 4, 16, seed, step)

    assert batch(0, 3).shape == (4, 17)
    np.testing.assert_array_equal(batch(0, 3), batch(0, 3))
    others = [batch(0, 4), batch(1, 3), batch(3, 0)]
    assert not any(np.array_equal(batch(0, 3), other) for other in others)
    # Every position of the text can be the last of a window, and none is beyond.
    ends = {int(example.batch_at(np.arange(6), 1, 4, 0, step)[0, -1]) for step in range(20)}
    assert ends == {4, 5}


def test_validation_sees_each_character_once(example):
    batches = example.batches_in_order(np.arange(100), 4, 8)
    assert [b.shape for b in batches] == [(4, 9)] * 3
    np.testing.assert_array_equal(np.concatenate(batches)[:, 1:].ravel(), np.arange(1, 97))
