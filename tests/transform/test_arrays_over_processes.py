"""A function that closes over arrays which are spread over processes, outside of `jax.jit`.

JAX itself refuses to compile such a function.
"""

import numpy as np
import pytest

from tests.support import closed_over_worker
from tests.support.processes import run_workers


@pytest.mark.process
def test_what_no_process_holds_as_a_whole_is_not_searched_for_its_range(tmp_path):
    alone = closed_over_worker.product()
    exact = closed_over_worker.WEIGHT * closed_over_worker.BIAS
    np.testing.assert_allclose(alone, exact, rtol=0, atol=0.05)
    for seen in run_workers("closed_over_worker", 2, tmp_path):
        np.testing.assert_array_equal(seen["out"], alone, strict=True)
