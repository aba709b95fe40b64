"""PyTorch's promote list, the ops that it does not list, and the dtypes that it never touches.

Rows and terms as in ``test_torch_lists``. "Computed" values vote on the dtype of an operation, and
so do arguments that are as large as its result.
"""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import jax.scipy.special as jsp
import numpy as np
import pytest
from jax import lax, nn
from jax.scipy import ndimage

from jmp_autocast import BF16, autocast, full_precision
from tests.support.jaxprs import find, through_a_dot, trace
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


# --- promote ----------------------------------------------------------------------------------

INDEX = np.array([1, 3])
COLUMNS = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])
PROMOTE = [
    Row("addcdiv", lambda a, b: a + a / b, (V, V)),
    Row("addcmul", lambda a, b: a + b * b, (V, V)),
    Row("atan2", jnp.arctan2, (V, V)),
    Row("cross", jnp.cross, ((4, 3), (4, 3))),
    Row("dot", jnp.dot, (V, V)),
    Row("vdot", jnp.vdot, (V, V)),
    Row("inner", jnp.inner, (V, V)),
    Row("index_put", lambda a, b: a.at[INDEX].set(b), (V, (2,))),
    Row("scatter_add", lambda a, b: a.at[COLUMNS, jnp.arange(4)].add(b), (M, (2, 4))),
    Row("grid_sampler", lambda a, b: ndimage.map_coordinates(a, [3 * b], 1), (V, V)),
    Row("add", jnp.add, (V, V)),
    Row("sub", jnp.subtract, (V, V)),
    Row("mul", jnp.multiply, (V, V)),
    Row("div", jnp.divide, (V, V)),
    Row("maximum", jnp.maximum, (V, V)),
    Row("where", lambda a, b: jnp.where(np.arange(4) > 1, a, b), (V, V)),
    Row("fmod", jnp.fmod, (V, V)),
    Row("cat", lambda a, b: jnp.concatenate([a, b]), (V, V)),
    Row("stack", lambda a, b: jnp.stack([a, b]), (V, V)),
    Row("hstack", lambda a, b: jnp.hstack([a, b]), (M, M)),
]


def mixed(row, low, full):
    """The op with one operand that a dot computed and one in float32."""

    def fn(*xs):
        xs = list(xs)
        xs[low] = through_a_dot(xs[low])
        if full == "computed":
            xs[1 - low] = jnp.exp(xs[1 - low])
        return row.fn(*xs)

    return computed(fn, "bfloat16")


@functools.cache
def promoted_values(low, full):
    """Per op: the result of autocast, and in float32 of the operands that it should see."""
    xs = [arrays(row.shapes) for row in PROMOTE]
    ours = run_all([mixed(row, low, full) for row in PROMOTE], xs)

    def by_hand(row):
        def fn(*xs):
            xs = list(xs)
            xs[low] = xs[low].astype("bfloat16").astype("float32")
            if full == "computed":
                xs[1 - low] = jnp.exp(xs[1 - low])
            return row.fn(*xs)

        return fn

    want = run_all([by_hand(row) for row in PROMOTE], xs)
    return {row.op: pair for row, *pair in zip(PROMOTE, ours, want, strict=True)}


@by_name(PROMOTE)
@pytest.mark.parametrize("low", [0, 1], ids=["low_first", "full_first"])
@pytest.mark.parametrize("full", ["computed", "argument"])
def test_promote(row, low, full):
    """test_autocast_torch_need_autocast_promote, expect_builtin_promote, and cat and stack on the
    CPU: one operand in float32 makes the others float32, in both orders (checks 3, 4, 5)."""
    assert result_dtype(mixed(row, low, full), *arrays(row.shapes)) == "float32"
    ours, want = promoted_values(low, full)[row.op]
    # The weights of an interpolation are computed in the dtype of the coordinates.
    rtol = 2**-8 if row.op == "grid_sampler" else 0
    np.testing.assert_allclose(ours, want, rtol=rtol)


@by_name(PROMOTE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_promote_of_equals(row, dtype):
    """Operands that agree stay as they are: low on low, float32 on float32 (checks 3, 4)."""
    xs = arrays(row.shapes)
    assert result_dtype(computed(row.fn, dtype), *xs) == "float32"
    fn = computed(lambda *xs: row.fn(*map(through_a_dot, xs)), dtype)
    assert result_dtype(fn, *xs) == dtype
    assert result_dtype(computed(row.fn, dtype), *cast(xs, dtype)) == dtype


COMPARISONS = [jnp.equal, jnp.not_equal, jnp.greater, jnp.greater_equal, jnp.less, jnp.less_equal]


@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", DTYPES)
def test_comparisons(compare, dtype):
    """test_autocast_torch_expect_builtin_promote, methods_expect_builtin_promote (check 4)."""
    a, b = arrays((V, V))
    low = a.astype(jnp.dtype(dtype)).astype(np.float32)
    b[:2] = low[:2]
    out = computed(lambda a, b: compare(through_a_dot(a), b), dtype)(a, b)
    assert out.dtype == bool
    np.testing.assert_array_equal(out, compare(low, b))


# --- unlisted ---------------------------------------------------------------------------------

UNLISTED = {
    "relu": nn.relu,
    "gelu": lambda a: nn.gelu(a, approximate=False),
    "gelu_tanh": nn.gelu,
    "silu": nn.silu,
    "sigmoid": nn.sigmoid,
    "tanh": jnp.tanh,
    "leaky_relu": nn.leaky_relu,
    "glu": lambda a: nn.glu(a, axis=0),
    "erf": jsp.erf,
    "erfc": jsp.erfc,
    "sqrt": jnp.sqrt,
    "abs": jnp.abs,
    "neg": jnp.negative,
    "sign": jnp.sign,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "add_scalar": lambda a: a + 1.5,
    "clamp": lambda a: jnp.clip(a, 0.2, 0.8),
    "masked_fill": lambda a: jnp.where(a > 0.5, -1e4, a),
    "where_zero": lambda a: jnp.where(a > 0.5, a, 0.0),
    "amax": jnp.max,
    "cummax": lax.cummax,
    "sort": jnp.sort,
    "topk": lambda a: lax.top_k(a, 2)[0],
    "gather": lambda a: jnp.take_along_axis(a, np.arange(4), 0),
    "index_select": lambda a: jnp.take(a, INDEX),
    "embedding": lambda a: a[INDEX],
    "max_pool": lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (2,), (2,), "VALID"),
    "avg_pool": lambda a: lax.reduce_window(a, 0.0, lax.add, (2,), (2,), "VALID") / 2,
    "pad": lambda a: jnp.pad(a, 1),
    "reflection_pad": lambda a: jnp.pad(a, 2, mode="reflect"),
    "reshape_transpose": lambda a: a.reshape(2, 2).T,
}


@pytest.mark.parametrize("fn", UNLISTED.values(), ids=UNLISTED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unlisted(fn, dtype):
    """What PyTorch does not list runs in the dtype of its input."""
    (x,) = arrays((V,))
    assert result_dtype(computed(fn, dtype), x) == "float32"
    assert result_dtype(computed(fn, dtype), x.astype(dtype)) == dtype
    assert result_dtype(computed(lambda a: fn(through_a_dot(a)), dtype), x) == dtype


def test_nearest_neighbours():
    """Listed as float32 by PyTorch. A copy of elements: 16 bits on the way to a matmul."""
    (x,) = arrays((V,))
    fn = lambda a: jax.image.resize(through_a_dot(a), (8,), "nearest")
    assert result_dtype(computed(fn), x) == "float32"
    jaxpr = trace(computed(lambda a: through_a_dot(fn(a))), x)
    assert [eqn.outvars[0].aval.dtype for eqn in find(jaxpr, "gather")] == [jnp.bfloat16]
    declared = lambda a: jax.image.resize(a, (8,), "nearest")
    assert result_dtype(computed(declared), x.astype("bfloat16")) == "bfloat16"


# PyTorch computes these in float32 and rounds to the dtype of their operands. Here the values in
# the program stay float32, and are rounded when they are returned in the computed dtype.
ROUNDED_ON_RETURN = {
    "elu": nn.elu,
    "logsigmoid": nn.log_sigmoid,
    "mish": nn.mish,
    "logaddexp": lambda a: jnp.logaddexp(a, a),
    "xlogy": lambda a: jsp.xlogy(a, a),
    "logit": jsp.logit,
    "var": jnp.var,
    "std": jnp.std,
    "nansum": jnp.nansum,
    "exp2": jnp.exp2,
    "atan": jnp.arctan,
    "asinh": jnp.arcsinh,
    "acosh": lambda a: jnp.arccosh(1 + a),
    "atanh": jnp.arctanh,
    "lgamma": jsp.gammaln,
    "digamma": jsp.digamma,
    "logcumsumexp": lax.cumlogsumexp,
    "celu": nn.celu,
    "selu": nn.selu,
    "logaddexp2": lambda a: jnp.logaddexp2(a, a),
    "xlog1py": lambda a: jsp.xlog1py(a, a),
    "trace": lambda a: jnp.trace(a.reshape(2, 2)),
    "index_add": lambda a: a.at[INDEX].add(a[:2]),
    "followed": lambda a: 2 * jnp.arctan(-a) + a,
    "scaled": lambda a: a * jnp.exp(a[0]),  # arrays outvote a scalar
}


@functools.cache
def returned_values():
    """Per function: the result in the computed dtype, in the declared one, and by hand."""
    xs = [arrays((V,))] * len(ROUNDED_ON_RETURN)
    after = [lambda a, fn=fn: fn(through_a_dot(a)) for fn in ROUNDED_ON_RETURN.values()]
    of_computed = run_all([computed(fn, "bfloat16") for fn in after], xs)
    of_declared = run_all([autocast(fn, compute_dtype="bfloat16") for fn in after], xs)
    by_hand = run_all(ROUNDED_ON_RETURN.values(), [rounded(x, "bfloat16") for x in xs])
    columns = zip(of_computed, of_declared, by_hand, strict=True)
    return dict(zip(ROUNDED_ON_RETURN, columns, strict=True))


@pytest.mark.parametrize("name", ROUNDED_ON_RETURN)
def test_rounded_on_return(name):
    returned, declared, by_hand = returned_values()[name]
    assert declared.dtype == np.float32
    if name not in ("followed", "scaled", "selu"):  # they end in a sum or product of our own
        np.testing.assert_allclose(declared, by_hand, rtol=1e-4, atol=1e-5)
    assert returned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(returned, declared.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ROUNDED_ON_RETURN)
def test_rounded_on_return_from_low_operands_alone(name):
    (x,) = arrays((V,))
    fn = lambda a: ROUNDED_ON_RETURN[name](jnp.exp(a))
    assert result_dtype(computed(fn), x) == "float32"
    updated = lambda average, a: 0.9 * average + ROUNDED_ON_RETURN[name](through_a_dot(a))
    assert result_dtype(computed(updated, params=0), x, x) == "float32"
    layer = lambda bias, a: ROUNDED_ON_RETURN[name](through_a_dot(a) + bias)
    assert result_dtype(computed(layer, params=0), x, x) == "bfloat16"


def full_precision_of(fn):
    def in_scope(a):
        with full_precision():
            return fn(a)

    return in_scope


def test_rounded_on_return_by_default_rules_alone():
    """A rule of the user's, and the most careful level, say float32 themselves."""
    (x,) = arrays((V,))
    fn = lambda a: jnp.arctan(through_a_dot(a))
    for policy in (BF16.with_rules({"atan": "FP32"}), BF16.with_level("tensor_cores")):
        assert result_dtype(autocast(fn, policy=policy, output_dtype="computed"), x) == "float32"
    scoped = lambda a: full_precision_of(jnp.arctan)(through_a_dot(a))
    assert result_dtype(computed(scoped), x) == "float32"
    own = lambda elu: lambda a: elu(through_a_dot(a))
    elu = jax.jit(lambda a: jnp.where(a > 0, a, jnp.expm1(a)))
    assert result_dtype(computed(own(elu)), x) == "float32"
    assert result_dtype(computed(own(nn.elu)), x) == "bfloat16"


# PyTorch has no 16-bit kernels for these and raises, nor has XLA; a mean is the end of a loss.
FLOAT32_HERE = {
    "mean": jnp.mean,
    "cholesky": lambda a: jnp.linalg.cholesky(a.reshape(2, 2) + 2 * jnp.eye(2)),
    "solve": lambda a: jnp.linalg.solve(a.reshape(2, 2) + jnp.eye(2), a.reshape(2, 2)),
    "triangular_solve": lambda a: jsl.solve_triangular(a.reshape(2, 2), a.reshape(2, 2)),
    "svdvals": lambda a: jnp.linalg.svd(a.reshape(2, 2), compute_uv=False),
    "nuclear_norm": lambda a: jnp.linalg.norm(a.reshape(2, 2), "nuc"),
    "eigvalsh": lambda a: jnp.linalg.eigvalsh(a.reshape(2, 2)),
    "qr": lambda a: jnp.linalg.qr(a.reshape(2, 2))[0],
    "lu": lambda a: jsl.lu_factor(a.reshape(2, 2))[0],
    "irfft": lambda a: jnp.fft.irfft(jnp.fft.rfft(a)),
}


@pytest.mark.parametrize("fn", FLOAT32_HERE.values(), ids=FLOAT32_HERE)
def test_float32_where_pytorch_lists_nothing(fn):
    (x,) = arrays((V,))
    out = computed(lambda a: fn(through_a_dot(a)), "bfloat16")(x)
    assert out.dtype == jnp.float32
    want = fn(*rounded([x], "bfloat16"))
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)


# --- dtypes that are never touched, and inner functions ---------------------------------------

IGNORED = {
    "dot": lambda a: a @ a,
    "power": lambda a: a**3,
    "sum": jnp.sum,
    "norm": lambda a: jnp.sqrt(jnp.sum(a * a)) if a.dtype == jnp.float64 else jnp.sum(a * a),
    "exp": lambda a: jnp.exp(a) if a.dtype == jnp.float64 else a,
    "concatenate": lambda a: jnp.concatenate([a, a]),
}


@pytest.mark.parametrize("source", ["float64", "int32", "complex64"])
@pytest.mark.parametrize("fn", IGNORED.values(), ids=IGNORED)
def test_ignored_types(fn, source):
    """test_autocast_ignored_types (check 7): the program is the one without autocast."""
    with jax.enable_x64(True):
        x = jnp.ones((3, 3), source)
        ours = trace(computed(fn, "bfloat16"), x)
        primitives = lambda jaxpr: [(str(e.primitive), e.outvars[0].aval) for e in jaxpr.eqns]
        assert primitives(ours) == primitives(trace(fn, x))


def test_float64_with_a_low_product():
    """A float64 matmul of a low value stays float64; without the cast JAX itself refuses it."""
    with jax.enable_x64(True):
        x, y = jnp.ones((2, 2), jnp.float32), jnp.ones((2, 2), jnp.float64)
        fn = computed(lambda x, y: (x @ x).astype(jnp.float64) @ y, "bfloat16")
        assert result_dtype(fn, x, y) == "float64"
        with pytest.raises(jax.dtypes.TypePromotionError, match="float64"):
            computed(lambda x, y: (x @ x) @ y, "bfloat16")(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cat_in_a_jitted_callee(dtype):
    """test_autocast_cat_jit (check 12): all float32, also inside another function."""
    cat = jax.jit(lambda a, b: jnp.concatenate([a, b, jnp.stack([a, b])[0]]))
    assert result_dtype(computed(lambda a, b: cat(a, b), dtype), *arrays((V, V))) == "float32"


def test_index_put_backward():
    """test_autocast_prioritize (check 13): forward and gradients in bfloat16, without an error."""
    put = lambda a, b: a.at[INDEX].set(b)
    a, b = map(jnp.asarray, cast(arrays((V, (2,))), "bfloat16"))
    out, vjp = jax.vjp(computed(put, "bfloat16"), a, b)
    assert out.dtype == jnp.bfloat16
    for grad, want in zip(vjp(jnp.ones_like(out)), ([1, 0, 1, 0], [1, 1]), strict=True):
        assert grad.dtype == jnp.bfloat16
        np.testing.assert_array_equal(grad.astype(jnp.float32), want)


def test_index_put_backward_of_computed_values():
    """Check 13 on float32 arguments whose values a dot computed: both ways in bfloat16."""
    put = lambda a, b: through_a_dot(a).at[INDEX].set(through_a_dot(b))
    fn = computed(put, "bfloat16")
    pull = lambda a, b: jax.vjp(fn, a, b)[1](jnp.ones((4,), jnp.bfloat16))
    jaxpr = trace(pull, *arrays((V, (2,))))
    assert [v.aval.dtype for v in jaxpr.jaxpr.outvars] == [jnp.float32] * 2
    moved = [v.aval.dtype for eqn in find(jaxpr, "scatter", "gather") for v in eqn.outvars]
    assert {dtype.name for dtype in moved if jnp.issubdtype(dtype, jnp.floating)} == {"bfloat16"}
