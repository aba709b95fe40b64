"""The transformer example: what loss scaling does for it, and that a kill costs it nothing."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

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
