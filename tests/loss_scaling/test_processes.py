"""Loss scaling in two processes that talk over the loopback interface."""

import itertools
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.support.loss_scale_worker import BAD_STEP, STEPS, WEIGHTS
from tests.support.processes import environment_without_devices, free_port

WORKER = pathlib.Path(__file__).parents[1] / "support" / "loss_scale_worker.py"
LIMIT = 120  # seconds; a run takes some ten


def run(processes, folder, worker=WORKER):
    """Runs a worker in so many processes at once; returns what each of them saw."""
    environment = environment_without_devices()
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"}
    coordinator = f"127.0.0.1:{free_port()}"
    results = [folder / f"{i}-of-{processes}.npz" for i in range(processes)]
    children = []
    try:
        for i, result in enumerate(results):
            command = [sys.executable, worker, str(i), str(processes), coordinator, result]
            children.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        said = [child.communicate(timeout=LIMIT)[0].decode() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
    assert [child.returncode for child in children] == [0] * processes, "\n".join(said)
    return [dict(np.load(result)) for result in results]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (alone,) = run(1, folder)
    return alone, *run(2, folder)


SEEN = ("weights", "count", "mu", "nu", "scale", "skips")


@pytest.mark.parametrize("way", ["jit", "shard_map"])
def test_a_bad_shard_of_one_process_skips_the_step_in_both(runs, way):
    alone, *both = ({name: run[f"{way}.{i}"] for i, name in enumerate(SEEN)} for run in runs)
    for seen in both:
        assert seen["scale"].tolist() == [256, 512, 512, 256, 256, 512]
        assert seen["skips"].tolist() == [0, 0, 0, 1, 1, 1]
        for name in ("weights", "count", "mu", "nu"):
            steps = [step.tobytes() for step in seen[name]]
            changed = [new != old for old, new in itertools.pairwise(steps)]
            assert changed == [i != BAD_STEP for i in range(1, STEPS)]
        assert np.isfinite(seen["weights"]).all()
        assert (seen["weights"][-1] != WEIGHTS).all()
        for name in SEEN:
            np.testing.assert_array_equal(seen[name], alone[name], strict=True)
