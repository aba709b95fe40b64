"""What PyTorch's op lists decide beyond the dtype of one op, whose rows are in `conformance`.

"Computed" values vote on the dtype of an operation, and so do arguments that are as large as its
result. Where ours differs from PyTorch on purpose, the test says why.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import nn

from jmp_autocast import BF16, autocast, full_precision
from tests.support.jaxprs import dot_dtypes, find, through_a_dot, trace
from tests.support.torch_ops import (
    DTYPES,
    arrays,
    cast,
    computed,
    result_dtype,
    rounded,
    run_all,
)

pytestmark = pytest.mark.usefixtures("jit_caches")

M, V = (4, 4), (4,)
INDEX = np.array([1, 3])


# --- lower_precision_fp and fp32 --------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("product", "with_parameter"),
    [(lambda a, b: a @ b, "float32"), (lambda a, b: a @ b[0], "bfloat16")],
    ids=["addmm", "bias_of_one_example"],
)
def test_what_is_added_to_a_product_votes(product, with_parameter):
    """PyTorch adds inside its op and returns 16 bits. An added array that is no parameter is an
    activation here: it votes, so that a residual stream stays float32. So does a parameter of full
    size, or 16 bits would round the weight in `w + a @ b`."""
    a, b = arrays((M, M))
    added = product(a, b)
    fn = lambda added, a, b: added + product(a, b)
    assert result_dtype(computed(fn), added, a, b) == "float32"
    assert result_dtype(computed(fn, params=0), added, a, b) == with_parameter


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


# --- promote, and what is not listed ----------------------------------------------------------

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


def test_nearest_neighbors():
    """Listed as float32 by PyTorch. A copy of elements: 16 bits on the way to a matmul."""
    (x,) = arrays((V,))
    fn = lambda a: jax.image.resize(through_a_dot(a), (8,), "nearest")
    assert result_dtype(computed(fn), x) == "float32"
    jaxpr = trace(computed(lambda a: through_a_dot(fn(a))), x)
    # The second gather is there for its derivative alone: nothing reads it.
    gathered = [eqn.outvars[0] for eqn in find(jaxpr, "gather")]
    assert [v.aval.dtype for v in gathered] == [jnp.bfloat16, jnp.float32]
    (view,) = find(jaxpr, "source_view")
    assert view.outvars[0].aval.dtype == jnp.bfloat16
    declared = lambda a: jax.image.resize(a, (8,), "nearest")
    assert result_dtype(computed(declared), x.astype("bfloat16")) == "bfloat16"


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


# --- dtypes that are never touched, and inner functions ---------------------------------------

IGNORED = {
    "dot": lambda a: a @ a,
    "power": lambda a: a**3,
    "sum": jnp.sum,
    "norm": lambda a: jnp.sqrt(jnp.sum(a * a)) if a.dtype == jnp.float64 else jnp.sum(a * a),
    "exp": lambda a: jnp.exp(a) if a.dtype == jnp.float64 else a,
    "concatenate": lambda a: jnp.concatenate([a, a]),
    "atan2": lambda a: jnp.arctan2(a, a) + a * a if a.dtype == jnp.float64 else a,
    "softmax": lambda a: nn.softmax(a @ a) if a.dtype == jnp.float64 else a,
    "maximum": lambda a: jnp.maximum(a, a.T),
    "minimum": lambda a: jnp.minimum(a, a.T),
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
