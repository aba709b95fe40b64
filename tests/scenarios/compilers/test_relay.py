"""The scenarios of TVM's two mixed-precision passes, Relay's (1-18) and Relax's (19-29)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, autocast
from tests.support.compiler_programs import (
    COMBINATIONS,
    DTYPES,
    KERNEL,
    LEVELS,
    X,
    affine,
    all_casts,
    cast,
    conv,
    of,
    relu,
    result_dtypes,
    round_trips,
    silu,
    softmax,
    works,
)
from tests.support.jaxprs import assert_dots_run_in, casts, dot_dtypes, dtypes, find, trace

in_combinations = pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)

W, MASK = of(6, 6, seed=2), of(6, 6, seed=3) > 0


@in_combinations
def test_single_convolution(dtype, level):
    """1: cast, cast, convolution, cast."""
    jaxpr = trace(cast(conv, dtype, level), X, KERNEL)
    names = [eqn.primitive.name for eqn in jaxpr.eqns if eqn.primitive.name != "source_view"]
    assert names == [*["convert_element_type"] * 2, "conv_general_dilated", "convert_element_type"]
    assert dot_dtypes(jaxpr) == [(dtype,) * 3]
    assert jaxpr.jaxpr.outvars[0].aval.dtype == jnp.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", ["o1", "compute"])
def test_an_affine_map_behind_a_convolution_is_low(level, dtype):
    """2: the scale and the bias of a norm abstain, also where they are no declared parameters."""
    fn = lambda x, k, scale, bias: affine(conv(x, k), scale, bias)
    low = cast(fn, dtype, level, params=None, output_dtype="computed")
    jaxpr = trace(low, X, KERNEL, of(4), of(4))
    assert result_dtypes(jaxpr, "mul", "add") == [dtype] * 2
    assert not casts(jaxpr, dtype, "float32")


@pytest.mark.parametrize("level", ["o1", "compute"])
def test_a_sum_of_convolutions_is_low(level):
    """6: conv + (conv + conv)."""
    fn = lambda x, k: conv(x, k) + (conv(x, k) + conv(x, k))
    jaxpr = trace(cast(fn, level=level, output_dtype="computed"), X, KERNEL)
    assert result_dtypes(jaxpr, "add") == ["bfloat16"] * 2
    assert all_casts(jaxpr) == [("float32", "bfloat16")] * 2


@in_combinations
def test_one_cast_before_a_softmax(dtype, level):
    """7: and none inside it."""
    jaxpr = trace(cast(lambda x, k: softmax(conv(x, k)), dtype, level), X, KERNEL)
    assert all_casts(jaxpr) == [("float32", dtype)] * 2 + [(dtype, "float32")]
    assert {d for name, d in works(jaxpr) if name[0] != "c"} == {"float32"}


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f], ids=["jit", "remat", "f"])
def test_a_dtype_passes_through_a_binding(wrap):
    """9: what a call returns in 16 bits is read so by the next, without a cast between them."""
    first, second = wrap(lambda x, k: conv(x, k)), wrap(lambda h, k: conv(jnp.tanh(h), k))
    jaxpr = trace(cast(lambda x, k: second(first(x, k), k), params=1), X, KERNEL)
    assert_dots_run_in("bfloat16", jaxpr)
    assert result_dtypes(jaxpr, "tanh") == ["bfloat16"]
    assert len(casts(jaxpr, "bfloat16", "float32")) == 1
    assert not round_trips(jaxpr)


@pytest.mark.parametrize("level", ["o1", "compute"])
def test_branches_of_a_where(level):
    """10: the branches are low, and the predicate compares what the program compares."""

    def fn(data, w):
        a = data @ w
        return jnp.where(data > 0.5, a, jnp.tanh(a))

    jaxpr = trace(cast(fn, level=level, params=1), W, W)
    (select,) = find(jaxpr, "select_n")
    assert dtypes(select.invars) == ("bool", "bfloat16", "bfloat16")
    (compare,) = find(jaxpr, "gt")
    assert compare.invars[0] is jaxpr.jaxpr.invars[0]


CLIP = functools.partial(jnp.clip, min=-70_000.0, max=70_000.0)


@pytest.mark.parametrize("level", ["o1", "compute"])
@pytest.mark.parametrize(("dtype", "clipped"), [("float16", "float32"), ("bfloat16", "bfloat16")])
def test_clip_bounds_outside_float16(dtype, clipped, level):
    """13 and 14: the bounds would be infinite; one cast brings the low value up to them."""
    jaxpr = trace(cast(lambda x: CLIP(jnp.tanh(x @ x)), dtype, level), W)
    assert result_dtypes(jaxpr, "tanh", "max", "min") == [dtype, clipped, clipped]
    assert len(casts(jaxpr, dtype, "float32")) == 1
    assert not round_trips(jaxpr)


# --- Relax ------------------------------------------------------------------------------------


def test_a_relu_between_convolutions_and_float32():
    """19: one that float32 also reads is not narrowed; the last is low and cast at the output."""

    def fn(x, k):
        first = relu(jnp.exp(x))
        return relu(conv(first, k)), jnp.exp(first)

    jaxpr = trace(cast(fn, params=1), X, KERNEL)
    assert result_dtypes(jaxpr, "max") == ["float32", "bfloat16"]
    assert casts(jaxpr, "bfloat16", "float32") == [jaxpr.eqns[-1]]


def test_a_relu_that_convolutions_alone_read():
    """19, its other half: all its consumers want it low."""
    jaxpr = trace(cast(lambda x, k: conv(relu(jnp.exp(x)), k), params=1), X, KERNEL)
    assert result_dtypes(jaxpr, "max") == ["bfloat16"]


@pytest.mark.parametrize("level", ["o1", "compute"])
@pytest.mark.parametrize("between", [relu, jnp.tanh, jnp.abs, lambda h: h.reshape(1, 4, 9, 4)])
def test_no_cast_between_convolutions(between, level):
    """20: conv -> relu -> conv."""
    fn = lambda x, k: conv(between(conv(x, k)), k)
    jaxpr = trace(cast(fn, level=level, params=1), X, KERNEL)
    assert all_casts(jaxpr) == [("float32", "bfloat16")] * 2 + [("bfloat16", "float32")]


@pytest.mark.parametrize("level", ["o1", "compute"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_the_same_given_or_closed_over(dtype, level):
    """21: the sum and the activation are low in both cases, and agree."""
    params, bias = {"w": W, "bias": of(6)}, of(6)
    given = lambda params, x: silu(x @ params["w"] + params["bias"])
    closed = lambda params, x: silu(x @ params["w"] + bias)
    jaxprs = [trace(cast(f, dtype, level), params, W) for f in (given, closed)]
    for jaxpr in jaxprs:
        assert result_dtypes(jaxpr, "add", "logistic", "mul") == [dtype] * 3
    assert works(jaxprs[0]) == works(jaxprs[1])
    values = [jax.jit(cast(f, dtype, level))(params, W) for f in (given, closed)]
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [lambda x: x, jnp.exp], ids=["input", "computed"])
def test_operands_are_concatenated_before_they_are_cast(make, level):
    """23: one cast, not two."""
    fn = lambda w, x, y: jnp.concatenate([make(x), make(y)]) @ w
    jaxpr = trace(cast(fn, level=level, params=0), W, W, 2 * W)
    assert result_dtypes(jaxpr, "concatenate") == ["float32"]
    assert len(casts(jaxpr, "float32", "bfloat16")) == 2  # the concatenation and the weight


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [lambda x: x, jnp.exp], ids=["input", "computed"])
def test_a_value_for_a_product_and_a_softmax(make, level):
    """24 and 51: float32 as it is for one, one cast for the other."""
    fn = lambda w, x: (v := make(x), v @ w + v.T @ w, softmax(v), jnp.log(v))[1:]
    jaxpr = trace(cast(fn, level=level, params=0), W, np.abs(W))
    assert len(casts(jaxpr, "float32", "bfloat16")) == 2  # the value and the weight
    for eqn in find(jaxpr, "exp", "log", "reduce_max"):
        assert dtypes(eqn.invars) == ("float32",)
    assert not round_trips(jaxpr)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_opaque_call_with_float16_operands(dtype):
    """26: neither cast up nor down, whatever the compute dtype is."""

    def fn(x):
        y = (x @ x).astype(jnp.float16)
        out = jax.ShapeDtypeStruct(y.shape, jnp.float16)
        return jax.pure_callback(np.abs, out, y)

    jaxpr = trace(cast(fn, dtype), W)
    (call,) = find(jaxpr, "pure_callback")
    assert dtypes((*call.invars, *call.outvars)) == ("float16", "float16")
    user_cast = [] if dtype == "float16" else [(dtype, "float16")]
    assert all_casts(jaxpr) == [("float32", dtype), *user_cast]


@pytest.mark.parametrize("level", LEVELS)
def test_a_slice_of_a_product(level):
    """27: Relax casts it up and down again; here it stays low until float32 needs it."""

    def fn(w, x, i):
        h = lax.dynamic_slice(x @ w, (i, 0), (3, 6))
        return h @ w, jnp.exp(h)

    jaxpr = trace(cast(fn, level=level, params=0), W, W, np.int32(1))
    assert result_dtypes(jaxpr, "dynamic_slice") == ["bfloat16"]
    assert not round_trips(jaxpr)
    assert len(casts(jaxpr, "bfloat16", "float32")) == 2  # for exp, and on return


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
def test_parameters_that_are_low_already(policy, level):
    """28: they are accepted, and never cast up."""
    dtype = jnp.dtype(policy.compute_dtype)
    params = {"w": jnp.asarray(W, dtype), "b": jnp.asarray(of(6), dtype)}
    fn = lambda p, x: relu(x.astype(dtype) @ p["w"] + p["b"])
    jaxpr = trace(autocast(fn, policy=policy.with_level(level)), params, W)
    assert all_casts(jaxpr) == [("float32", dtype.name)]
    assert {d for _, d in works(jaxpr)} == {dtype.name}
