"""PyTorch's lower_precision_fp and fp32 lists for CUDA, op by op, as their JAX counterparts.

Each row is named after the ATen op. "Low" is the compute dtype. Where ours differs from PyTorch on
purpose, the row is in a test of its own, with the reason.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
import optax
import pytest
from jax import lax, nn

from tests.support.jaxprs import dot_dtypes, find, through_a_dot, trace
from tests.support.torch_ops import (
    DTYPES,
    M,
    Row,
    V,
    arrays,
    by_name,
    cast,
    computed,
    result_dtype,
    rounded,
    run_all,
)

pytestmark = pytest.mark.usefixtures("jit_caches")


# --- lower_precision_fp -----------------------------------------------------------------------


def conv(x, w, b, dims=None):
    spatial = (1,) * (x.ndim - 2)
    out = lax.conv_general_dilated(x, w, spatial, "VALID", dimension_numbers=dims)
    return out + (b if dims else b.reshape(-1, *spatial))


def conv_transpose(dims):
    return lambda x, w: lax.conv_transpose(
        x, w, (1,) * (x.ndim - 2), "VALID", dimension_numbers=dims
    )


def rnn_cell(activation):
    return lambda x, h, w, u, b, c: activation(x @ w.T + b + h @ u.T + c)


def lstm_cell(x, h, c, w, u, b):
    i, f, g, o = jnp.split(x @ w.T + h @ u.T + b, 4, axis=-1)
    return nn.sigmoid(o) * jnp.tanh(nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g))


def gru_cell(x, h, w, u, b):
    r, z, n = jnp.split(x @ w.T + b, 3, axis=-1)
    s, y, m = jnp.split(h @ u.T, 3, axis=-1)
    z = nn.sigmoid(z + y)
    return (1 - z) * jnp.tanh(n + nn.sigmoid(r + s) * m) + z * h


LOW = [
    Row("conv1d", conv, ((2, 3, 8), (4, 3, 3), V)),
    Row("conv2d", conv, ((2, 3, 6, 6), (4, 3, 3, 3), V)),
    Row("conv3d", conv, ((1, 2, 4, 4, 4), (4, 2, 2, 2, 2), V)),
    Row(
        "conv_tbc", lambda a, b, c: conv(a, b, c, ("WNC", "WIO", "WNC")), ((8, 2, 3), (3, 3, 4), V)
    ),
    Row("conv_transpose1d", conv_transpose(("NCH", "IOH", "NCH")), ((2, 3, 8), (3, 4, 3))),
    Row("conv_transpose2d", conv_transpose(("NCHW", "IOHW", "NCHW")), ((2, 3, 6, 6), (3, 4, 3, 3))),
    Row("matmul", jnp.matmul, (M, M)),
    Row("mm", jnp.dot, (M, M)),
    Row("mv", jnp.dot, (M, V)),
    Row("bmm", jnp.matmul, ((2, 4, 4), (2, 4, 4))),
    Row("einsum", lambda a, b: jnp.einsum("bij,bjk->bik", a, b), ((2, 4, 4), (2, 4, 4))),
    Row("linalg_vecdot", jnp.vecdot, (M, M)),
    Row("linear", lambda a, b, c: a @ b.T + c, (M, M, V)),
    Row("linear_3d", lambda a, b, c: a @ b.T + c, ((2, 4, 4), M, V)),
    Row("addmm", lambda a, b, c: a + b @ c, (M, M, M), params=(0,)),
    Row("addmv", lambda a, b, c: a + b @ c, (V, M, V), params=(0,)),
    Row("addbmm", lambda a, b, c: a + jnp.einsum("bij,bjk->ik", b, c), (M, (2, *M), (2, *M)), (0,)),
    Row("baddbmm", lambda a, b, c: a + b @ c, ((2, *M), (2, *M), (2, *M)), params=(0,)),
    Row("chain_matmul", lambda a, b, c: jnp.linalg.multi_dot([a, b, c]), (M, M, M)),
    Row("matrix_power", lambda a: jnp.linalg.matrix_power(a, 3), (M,)),
    Row("tensordot", jnp.tensordot, (M, M)),  # indistinguishable from einsum; PyTorch promotes
    Row("rnn_tanh_cell", rnn_cell(jnp.tanh), (M, M, M, M, V, V)),
    Row("rnn_relu_cell", rnn_cell(nn.relu), (M, M, M, M, V, V)),
    Row("lstm_cell", lstm_cell, (M, M, M, (16, 4), (16, 4), (16,)), params=(2,)),
    Row("gru_cell", gru_cell, (M, M, (12, 4), (12, 4), (12,)), params=(1,)),
]


@functools.cache
def low_values(dtype):
    """Per op: the result of autocast, and of the function on arguments cast by hand."""
    xs = [arrays(row.shapes) for row in LOW]
    ours = run_all([computed(row.fn, dtype, params=row.params) for row in LOW], xs)
    by_hand = run_all([row.fn for row in LOW], [cast(x, dtype) for x in xs])
    return {row.op: pair for row, *pair in zip(LOW, ours, by_hand, strict=True)}


@by_name(LOW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lower_precision(row, dtype):
    """test_autocast_torch_fp16/_bf16/_16, nn_fp16, linalg_fp16, methods_fp16 (check 1)."""
    xs = arrays(row.shapes)
    fn = computed(row.fn, dtype, params=row.params)
    assert result_dtype(fn, *xs) == dtype
    assert result_dtype(fn, *cast(xs, dtype)) == dtype
    ours, by_hand = low_values(dtype)[row.op]
    assert ours.dtype == by_hand.dtype == dtype
    np.testing.assert_array_equal(ours, by_hand)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_dot_product_attention(dtype):
    """Low in PyTorch (check 1); the softmax inside is float32, so only close to a low one."""
    xs = arrays(((2, 4, 2, 4),) * 3)
    fn = computed(nn.dot_product_attention, dtype)
    assert result_dtype(fn, *xs) == dtype
    jaxpr = trace(fn, *xs)
    assert dot_dtypes(jaxpr) == [(dtype,) * 3] * 2
    assert {eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, "exp", "sub", "div")} == {
        "float32"
    }
    (out,) = run_all([fn], [xs])
    want = nn.dot_product_attention(*rounded(xs, dtype))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(np.float32), want, rtol=2 * eps)


# PyTorch adds inside its op and returns 16 bits. An added array that is no parameter is an
# activation here, as large as the result: it votes, so that a residual stream stays float32.
RESIDUAL = [row for row in LOW if row.op in ("addmm", "addmv", "baddbmm")]


@by_name(RESIDUAL)
def test_an_activation_added_to_a_product_votes(row):
    xs = arrays(row.shapes)
    assert result_dtype(computed(row.fn, "bfloat16"), *xs) == "float32"


# --- fp32, fp32_set_opt_dtype, fp32_append_dtype ----------------------------------------------


def layer_norm(x, scale, bias):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias


def rms_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def group_norm(x, scale, bias):
    groups = x.reshape(x.shape[0], 2, -1)
    mean, var = groups.mean(-1, keepdims=True), groups.var(-1, keepdims=True)
    return ((groups - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape) * scale + bias


def cosine_similarity(a, b):
    norms = jnp.linalg.norm(a, axis=1) * jnp.linalg.norm(b, axis=1)
    return jnp.sum(a * b, 1) / jnp.maximum(norms, 1e-4)


def renorm(a):
    norms = jnp.sqrt(jnp.sum(a * a, axis=1, keepdims=True))
    return a * jnp.minimum(1.0, 0.5 / norms)


def resize(method):
    return lambda a: jax.image.resize(a, (2, 8, 8), method)


T = np.array([0, 2, 1, 3])
SINGLE = [
    *(
        Row(fn.__name__, fn, (V,))
        for fn in (jnp.cosh, jnp.exp, jnp.expm1, jnp.log, jnp.log10, jnp.log2, jnp.log1p)
    ),
    *(Row(fn.__name__, fn, (V,)) for fn in (jnp.reciprocal, jnp.sinh, jnp.tan, lax.rsqrt)),
    Row("acos", jnp.arccos, (V,)),
    Row("asin", jnp.arcsin, (V,)),
    Row("erfinv", jsp.erfinv, (V,)),
    Row("pow.Tensor_Tensor", jnp.power, (V, V)),
    Row("cumsum", jnp.cumsum, (V,)),
    Row("cumprod", jnp.cumprod, (V,)),
    Row("rtruediv", lambda a: 1.0 / a, (V,)),
]
COMPOSITE = [  # more than one rounding, or a scalar that jnp rounds to the dtype of its argument
    Row("pow.Tensor_Scalar", lambda a: jnp.power(a, 1.7), (V,)),
    Row("pow.Scalar", lambda a: jnp.power(1.7, a), (V,)),
    Row("softplus", nn.softplus, (V,)),
    Row("logsumexp", lambda a: nn.logsumexp(a, 1), (M,)),
    Row("softmax.int", nn.softmax, (M,)),
    Row("log_softmax.int", nn.log_softmax, (M,)),
    Row("layer_norm", layer_norm, (M, V, V)),
    Row("rms_norm", rms_norm, (M, V)),
    Row("group_norm", group_norm, (M, V, V)),
    Row("renorm", renorm, (M,)),
    Row("upsample_linear", resize("linear"), ((2, 4, 4),), narrows=True),
    Row("upsample_bicubic", resize("cubic"), ((2, 4, 4),), narrows=True),
]
SUMS = [
    Row("frobenius_norm", lambda a: jnp.sqrt(jnp.sum(a * a)), (M,)),
    Row("cosine_similarity", cosine_similarity, (M, M)),
    Row("poisson_nll_loss", lambda a, b: jnp.mean(jnp.exp(a) - b * a), (V, V)),
    Row("nll_loss", lambda a: -jnp.mean(jnp.take_along_axis(a, T[:, None], 1)), (M,)),
    Row("kl_div", lambda a, b: jnp.sum(jsp.xlogy(b, b) - b * a) / 8, (V, V)),
    Row("l1_loss", lambda a, b: jnp.mean(jnp.abs(a - b)), (V, V)),
    Row("huber_loss", lambda a, b: jnp.mean(optax.huber_loss(a, b)), (V, V)),
    Row("mse_loss", lambda a, b: jnp.mean(jnp.square(a - b)), (V, V)),
    Row("margin_ranking_loss", lambda a, b: jnp.mean(nn.relu(0.5 - (a - b))), (V, V)),
    Row("soft_margin_loss", lambda a: jnp.mean(jnp.log1p(jnp.exp(-a))), (V,)),
    Row(
        "triplet_margin_loss",
        lambda a, b, c: jnp.mean(nn.relu(1 + jnp.linalg.norm(a - b) - jnp.linalg.norm(a - c))),
        (M, M, M),
    ),
    Row(
        "binary_cross_entropy_with_logits",
        lambda a, b: jnp.mean(optax.sigmoid_binary_cross_entropy(a, b)),
        (V, V),
    ),
    Row(
        "cross_entropy",
        lambda a: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(a, T)),
        (M,),
    ),
    Row("dist", lambda a, b: jnp.linalg.norm(a - b), (V, V)),
    Row("cdist", lambda a, b: jnp.sqrt(jnp.sum((a[:, None] - b[None]) ** 2, -1)), (M, M)),
    Row("prod", jnp.prod, (V,)),
    Row("prod.dim_int", lambda a: jnp.prod(a, 1), (M,)),
    Row("sum", jnp.sum, (V,)),
    Row("sum.dim_IntList", lambda a: jnp.sum(a, 1), (M,)),
    Row("linalg_vector_norm", jnp.linalg.norm, (V,)),
    Row("linalg_matrix_norm", lambda a: jnp.linalg.norm(a, 1), (M,)),
    Row("norm.ScalarOpt_dim", lambda a: jnp.linalg.norm(a, 1, axis=0), (M,)),
]
ALL_FULL = [
    *SINGLE,
    *COMPOSITE,
    *(dataclasses.replace(row, narrows=True) for row in SUMS),
]


def after_a_dot(row):
    return lambda *xs: row.fn(*map(through_a_dot, xs))


@functools.cache
def full_values(dtype):
    """Per op: autocast on values that a dot computed, on low arguments, and float32 by hand."""
    xs = [arrays(row.shapes) for row in ALL_FULL]
    after = run_all([computed(after_a_dot(row), dtype) for row in ALL_FULL], xs)
    of_low = run_all([computed(row.fn, dtype) for row in ALL_FULL], [cast(x, dtype) for x in xs])
    by_hand = run_all([row.fn for row in ALL_FULL], [rounded(x, dtype) for x in xs])
    return {row.op: got for row, *got in zip(ALL_FULL, after, of_low, by_hand, strict=True)}


@by_name(ALL_FULL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp32(row, dtype):
    """test_autocast_torch_fp32, nn_fp32, methods_fp32 (check 2), on values that a dot computed."""
    fn = computed(after_a_dot(row), dtype)
    assert result_dtype(fn, *arrays(row.shapes)) == "float32"
    after, _, by_hand = full_values(dtype)[row.op]
    assert after.dtype == by_hand.dtype == np.float32
    # XLA may contract a product and a sum of a composite; a rounding to 16 bits would be 4e-3.
    np.testing.assert_allclose(after, by_hand, rtol=0 if row in SINGLE else 1e-6)


@by_name(ALL_FULL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp32_of_arguments(row, dtype):
    """Check 2 on float32 and on 16-bit arguments. The cast that jnp writes itself stands."""
    xs = arrays(row.shapes)
    fn = computed(row.fn, dtype)
    assert result_dtype(fn, *xs) == "float32"
    assert result_dtype(fn, *cast(xs, dtype)) == (dtype if row.narrows else "float32")
    for eqn in find(trace(fn, *cast(xs, dtype)), "reduce_sum", "reduce_prod", "exp", "rsqrt"):
        assert eqn.invars[0].aval.dtype == jnp.float32
    _, of_low, by_hand = full_values(dtype)[row.op]
    # jnp.log10 writes its constant in the dtype of the argument: rounded before we see it.
    exact = row in SINGLE and row.op != "log10"
    tolerance = 0 if exact else 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(of_low.astype(np.float32), by_hand, tolerance, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dtype_that_the_user_gives_a_reduction_stands(dtype):
    """fp32_set_opt_dtype: ``torch.sum(x, dtype=low)`` is low (check 2)."""
    for fn in (lambda a: jnp.sum(a, dtype=dtype), lambda a: nn.softmax(a).astype(dtype)):
        assert result_dtype(fn, *arrays((V,))) == dtype
        assert result_dtype(computed(fn, dtype), *arrays((V,))) == dtype
        with jax.enable_x64(True):
            assert result_dtype(computed(fn, dtype), np.ones(V)) == dtype


# PyTorch casts a fresh copy for `pow(x, 2)` and `square`; here they are float32 where their result
# is (a sum, a norm, a mean) or where they are returned, and an activation squared on its way to a
# matmul stays low.
SQUARES = {
    "square": (jnp.square, "float32"),
    "pow_2": (lambda a: a**2, "float32"),
    "mul": (lambda a: a * a, "bfloat16"),
}


@pytest.mark.parametrize(("square", "returned"), SQUARES.values(), ids=SQUARES)
def test_a_square_is_float32_where_it_is_summed(square, returned):
    fn = computed(lambda a: jnp.sum(square(through_a_dot(a))), "bfloat16")
    (eqn,) = find(trace(fn, *arrays((V,))), "square", "integer_pow", "mul")
    assert eqn.outvars[0].aval.dtype == jnp.float32
    fn = computed(lambda a: through_a_dot(square(through_a_dot(a))), "bfloat16")
    (eqn,) = find(trace(fn, *arrays((V,))), "square", "integer_pow", "mul")
    assert eqn.outvars[0].aval.dtype == jnp.bfloat16
    fn = computed(lambda a: square(through_a_dot(a)), "bfloat16")
    (eqn,) = find(trace(fn, *arrays((V,))), "square", "integer_pow", "mul")
    assert eqn.outvars[0].aval.dtype == result_dtype(fn, *arrays((V,))) == returned
    (x,) = cast(arrays((V,)), "bfloat16")
    assert result_dtype(computed(square, "bfloat16"), x) == "bfloat16"  # declared so
