"""Every program keeps its signature under autocast, and its values and gradients as 16 bits can.

They run in bfloat16, and a part of them in float16 too. ``python -m tests.third_party`` runs all of
them in both.
"""

import jax
import numpy as np
import pytest

from .check import Comparison, matrix_products
from .tables import PROGRAMS

IN_FLOAT16 = set([*PROGRAMS][::6])


@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    comparison = Comparison(name, PROGRAMS[name])
    for dtype in ["bfloat16", "float16"] if name in IN_FLOAT16 else ["bfloat16"]:
        low = comparison.low(dtype)
        assert low.tree == comparison.plain.tree
        assert low.avals == comparison.plain.avals
        assert any(dtypes == (dtype, dtype) for dtypes in matrix_products(low.jaxpr)), dtype
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(comparison.exact))
        errors = comparison.errors(low, dtype)
        wrong = [(path, error, allowed) for path, error, allowed in errors if error > allowed]
        assert not wrong, dtype
