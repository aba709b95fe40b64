"""Loss scaling in two processes that talk over the loopback interface."""

import itertools

import numpy as np
import pytest

from tests.support.loss_scale_worker import BAD_STEP, STEPS, WEIGHTS
from tests.support.processes import run_workers


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (alone,) = run_workers("loss_scale_worker.py", 1, folder)
    return alone, *run_workers("loss_scale_worker.py", 2, folder)


SEEN = ("weights", "count", "mu", "nu", "scale", "skips")


@pytest.mark.process
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
