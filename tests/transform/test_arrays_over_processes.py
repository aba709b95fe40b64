"""A function that closes over arrays which are spread over processes, outside of `jax.jit`.

JAX itself refuses to compile such a function.
"""

import pathlib

import numpy as np

from tests.loss_scaling.test_processes import run

WORKER = pathlib.Path(__file__).parents[1] / "support" / "closed_over_worker.py"


def test_what_no_process_holds_as_a_whole_is_not_searched_for_its_range(tmp_path):
    (alone,) = run(1, tmp_path, WORKER)
    np.testing.assert_allclose(alone["out"], alone["exact"], rtol=0, atol=0.05)
    for seen in run(2, tmp_path, WORKER):
        np.testing.assert_array_equal(seen["out"], alone["out"], strict=True)
