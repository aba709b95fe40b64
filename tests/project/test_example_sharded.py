"""The sharded example in two real processes: as one, and what a kill and a resume do."""

import json
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.examples import EXAMPLES, load
from tests.support.processes import environment_without_devices, free_port

# Each collective operation of two processes takes milliseconds: of large batches, few are the
# validation text.
DEVICES, STEPS, KILL_AFTER = 4, 12, 9
OPTIONS = (
    "--layers 1 --width 16 --heads 2 --context 32 --batch-size 128 --learning-rate 1e-2 "
    f"--steps {STEPS} --growth-interval 2 --log-every 1 --checkpoint-every 4 --fsdp 2"
).split()
LIMIT = 240  # seconds; a run takes some ten
TIMEOUT = 20  # seconds until a process gives another up


@pytest.fixture(scope="module")
def example():
    return load("train_sharded")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the processes of a run; those of a test that failed do not outlive it."""
    compiled = tmp_path_factory.mktemp("compiled")  # each program is compiled once
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }
    children = []

    def start(processes, output, *more):
        environment = environment_without_devices() | settings
        environment["JAX_NUM_CPU_DEVICES"] = str(DEVICES // processes)
        command = [sys.executable, EXAMPLES / "train_sharded.py", *OPTIONS, *more]
        command += ["--output", output, "--num-processes", str(processes)]
        command += ["--coordinator", f"127.0.0.1:{free_port()}", "--timeout", str(TIMEOUT)]
        started = [
            subprocess.Popen(
                [*command, "--process-id", str(i)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(processes)
        ]
        children.extend(started)
        return started

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def finish(children):
    """Waits for the processes; returns what each of them said."""
    said = [child.communicate(timeout=LIMIT)[0] for child in children]
    assert [child.returncode for child in children] == [0] * len(children), "\n".join(said)
    return said


def steps(text):
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("step")]


def state_at_end(output):
    """The arrays of the last checkpoint, whole, by their path."""
    path = output / "checkpoints" / str(STEPS) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        kinds = checkpointer.metadata(path).item_metadata.tree
        whole = jax.tree.map(lambda kind: np.zeros(kind.shape, kind.dtype), kinds)
        saved = checkpointer.restore(path, whole)
    return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(saved)}


@pytest.fixture(scope="module")
def outputs(start, tmp_path_factory):
    """Directories of the same run by one process and by two."""
    folder = tmp_path_factory.mktemp("sharded")
    one, two = folder / "one", folder / "two"
    finish(start(1, one))
    said = finish(start(2, two))
    assert "4 devices in 2 processes: {'data': 2, 'fsdp': 2}" in said[0]
    assert (steps(said[0]), steps(said[1])) == (list(range(1, STEPS + 1)), [])
    return one, two


@pytest.mark.process
def test_two_processes_train_as_one(outputs):
    results = [json.loads((output / "result.json").read_text()) for output in outputs]
    for name in ("scales", "skipped_steps", "low_flops"):
        assert results[0][name] == results[1][name]
    assert results[0]["low_flops"] == 1
    # Sums over devices are added in another order.
    for name in ("losses", "train_loss", "validation_loss"):
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-3)
    assert results[0]["losses"][-1] < 0.99 * results[0]["losses"][0]
    one, two = map(state_at_end, outputs)
    assert one.keys() == two.keys()
    for path, array in one.items():
        if "['key']['bias']" not in path:  # softmax does not see it: its gradient is rounding alone
            assert np.linalg.norm(array - two[path]) <= 1e-2 * np.linalg.norm(two[path]), path
