"""The values of the rows: where a row is float32 it is so inside, and 16 bits are rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.jaxprs import through_a_dot
from tests.support.torch_ops import DTYPES, arrays, computed, run_all

from .rows import all_rows
from .runner import function_of, outcomes_of

# A part of them runs in 16 bits: a product that is added to float32, weights of an interpolation.
LOW_INSIDE = {"addbmm", "addmm", "addr", "baddbmm"}
LOW_INSIDE |= {"_addmm_activation", "addcmul", "gru_cell", "grid_sampler"}
# The product that they read stays float32: a decomposition multiplies its error.
DECOMPOSES = """
    cholesky inverse pinverse linalg_cond linalg_svd linalg_eig linalg_inv linalg_solve linalg_qr
    triangular_solve lu nuclear_norm
""".split()


# PyTorch promotes where strict JAX raises.
pytestmark = pytest.mark.usefixtures("as_users_run_it")


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


def wrong(names, ours, expected, tolerance):
    """The names and errors of the results that differ; a tolerance for each name."""
    found = {}
    for name, a, b in zip(names, ours, expected, strict=True):
        if a.dtype.kind in "biu":
            error = float((a != b).any())
        else:
            a, b = (np.nan_to_num(np.asarray(x, np.complex128), nan=7.0) for x in (a, b))
            error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        if not error <= tolerance(name):
            found[name] = error
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["all_bf16", "first_f32_rest_bf16", "first_bf16_rest_f32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_a_dot_computed(dtype, case):
    """As in float32 of the rounded inputs: a rounding inside would give an error of 4e-3.

    PyTorch: check 1 to 5 of its autocast tests, for all lists.
    """
    found = {o.row.op: o for o in outcomes_of(case, dtype)}
    rows = [o.row for o in found.values()]
    xs = [arrays(row.shapes) for row in rows]
    low = lambda x: x.astype(dtype).astype(x.dtype)
    by_hand = lambda row: jnp.asarray if row.op.startswith(tuple(DECOMPOSES)) else low
    ours = run_all(
        [computed(function_of(r, case, dtype), dtype, params=r.params) for r in rows], xs
    )
    expected = run_all([function_of(row, case, dtype, by_hand(row)) for row in rows], xs)
    assert [x.dtype.name for x in ours] == [
        o.got if o.got != "int64" else "int32" for o in found.values()
    ]

    def tolerance(op):
        return 1e-6 if found[op].got not in DTYPES and op not in LOW_INSIDE else 4 * eps(dtype)

    assert not wrong(found, ours, expected, tolerance)


# PyTorch computes these in float32 and rounds to the dtype of their operands. Here the values in
# the program stay float32, and are rounded when they are returned in the computed dtype.
ROUNDED_ON_RETURN = """
    elu logsigmoid mish logaddexp xlogy logit var std nansum exp2 atan asinh acosh atanh lgamma
    digamma logcumsumexp trace index_add celu selu logaddexp2 xlog1py affine scaled
""".split()


@pytest.mark.parametrize("op", ROUNDED_ON_RETURN)
def test_rounded_on_return_from_low_operands_alone(op):
    (row,) = [row for row in all_rows() if row.op == op]
    xs = arrays(row.shapes)
    fn = lambda enter: function_of(row, "all_bf16", "bfloat16", enter)
    dtype = lambda f, *args, **options: jax.eval_shape(computed(f, **options), *args).dtype
    assert dtype(fn(jnp.exp), *xs) == jnp.float32
    average = np.ones(jax.eval_shape(fn(jnp.exp), *xs).shape, np.float32)
    updated = lambda average, *xs: 0.9 * average + fn(through_a_dot)(*xs)
    assert dtype(updated, average, *xs, params=0) == jnp.float32
    bias = np.ones(xs[0].shape[-1:], np.float32)
    layer = lambda bias, *xs: fn(lambda x: through_a_dot(x) + bias)(*xs)
    assert dtype(layer, bias, *xs, params=0) == jnp.bfloat16
