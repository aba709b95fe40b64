"""The planner by itself: the dtype and the reason of each equation, before anything is emitted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from jmp_autocast import BF16, FP16, Policy, autocast, full_precision
from jmp_autocast.interpreters import Planner, Request, Source, ValueState
from jmp_autocast.interpreters.plan.avals import float_dtype
from tests.support.jaxprs import find, trace
from tests.support.plans import (
    DENORMAL,
    F16,
    FULL,
    LOW,
    LOWEST,
    all_equations,
    low,
    plan_of,
    planned,
    positions,
)

X = np.ones((8, 8), np.float32)
ROW = np.ones(8, np.float32)
MASK = np.ones((8, 8), bool)
DATA, PARAM = Source.DATA, Source.PARAM


def with_scope(h):
    with full_precision():
        return h * h


unknown = Primitive("test_planner_unknown")
unknown.def_abstract_eval(lambda x: x)


def loop(h):
    return lax.scan(lambda c, _: (lax.logistic(c), c), h, None, length=2)


def called_back(h):
    jax.debug.callback(lambda difference: None, h - 1.5)
    return h


def running_sum(h):
    return lax.scan(lambda c, _: (c + h, None), h, None, length=2)


def while_loop(h):
    return lax.while_loop(lambda c: c[0, 0] < 0, jnp.tanh, h)


def disagreeing(h):
    return lax.cond(h[0, 0] > 0, jnp.tanh, jnp.exp, h)


def agreeing(h):
    return lax.cond(h[0, 0] > 0, jnp.tanh, jnp.sin, h)


def square(h):
    return h @ h


def branching(first, second):
    return lambda h: lax.cond(MASK[0, 0], first, second, h - 1.5)


REASONS = {
    "matmul": (low(lambda h: h @ h), "dot_general", "LOWER_PRECISION", LOW),
    "vector_product": (low(lambda h: h[0] @ h[1]), "dot_general", "PROMOTE_LOW", LOW),
    "leaf_moved": (lambda x: x.T @ x, "transpose", "SOURCE", FULL),
    "leaves_alone": (lambda x: jnp.sin(jnp.asarray(X)), "sin", "SOURCE", FULL),
    "data_votes": (lambda x: x + x, "add", "PROMOTE_FULL", FULL),
    "folded": (lambda x: x * lax.sqrt(np.float32(2)), "sqrt", "SOURCE", FULL),
    "exp": (low(jnp.exp), "exp", "FP32", FULL),
    "sum": (low(jnp.sum), "reduce_sum", "FP32", FULL),
    "literals_alone": (low(lambda h: lax.logistic(h) * lax.sub(1.0, 0.25)), "sub", "SOURCE", FULL),
    "negative_power": (low(lambda h: lax.integer_pow(h, -2)), "integer_pow", "FP32", FULL),
    "positive_power": (low(lambda h: h**3), "integer_pow", "PROMOTE_LOW", LOW),
    "reciprocal": (low(lambda h: 1 / h), "div", "FP32", FULL),
    "zero_over": (low(lambda h: 0.0 / h), "div", "PROMOTE_LOW", LOW),
    "weak_type_dropped": (
        lambda x: (weak := lax.broadcast(0.3, (8, 8))) @ weak * x[0, 0],
        "convert_element_type",
        "STRUCTURAL",
        LOW,
    ),
    "promote_low": (low(lambda h: h * jnp.tanh(h)), "mul", "PROMOTE_LOW", LOW),
    "promote_full": (low(lambda h: h * jnp.exp(h)), "mul", "PROMOTE_FULL", FULL),
    "keep": (low(lambda h: lax.nextafter(h, h)), "nextafter", "KEEP", FULL),
    "unknown": (low(unknown.bind), unknown.name, "UNKNOWN", FULL),
    "no_float": (lambda x: lax.iota(jnp.int32, 4), "iota", "NO_FLOAT", None),
    "scope": (low(with_scope), "mul", "SCOPE", FULL),
    "user_cast": (low(lambda h: h.astype(F16)), "convert_element_type", "USER_CAST", F16),
    "other_half": (low(lambda h: lax.sin(h.astype(F16))), "sin", "DOMAIN", F16),
    "complex": (
        low(lambda h: lax.sort((h, lax.complex(h, h)), num_keys=1)),
        "sort",
        "DOMAIN",
        FULL,
    ),
    "integers": (
        lambda x: lax.dot(x.astype(jnp.int32), x, preferred_element_type=jnp.float32),
        "dot_general",
        "LOWER_PRECISION",
        LOW,
    ),
    "integer_result": (
        low(lambda h: lax.dot(h, h, preferred_element_type=jnp.int32)),
        "dot_general",
        "DOMAIN",
        None,
    ),
    "highest": (
        lambda x: jnp.dot(x, x, precision="highest"),
        "dot_general",
        "USER_PRECISION",
        FULL,
    ),
    "algorithm": (
        lambda x: jnp.dot(x, x, precision="BF16_BF16_F32_X3"),
        "dot_general",
        "USER_PRECISION",
        FULL,
    ),
    "literal": (low(lambda h: h + DENORMAL), "add", "LITERAL", FULL),
    "coordinates": (positions(65_536), "dot_general", "COORD", FULL),
    "few_coordinates": (positions(256), "dot_general", "COORD", FULL),
    "feeder": (low(lambda h: (d := h - 1.5) * jnp.exp(d)), "sub", "FEEDER", FULL),
    "feeder_of_complex": (low(lambda h: (h - 1.5).astype("complex64")), "sub", "FEEDER", FULL),
    "callback": (low(called_back), "sub", "NO_PRODUCT", FULL),
    "root": (low(lambda h: lax.sqrt(h * h) @ h), "mul", "FEEDER", FULL),
    "root_away_from_0": (low(lambda h: lax.sqrt(h * h + 1.0) @ h), "mul", "PROMOTE_LOW", LOW),
    "low_carry": (low(loop), "scan", "STRUCTURAL", LOW),
    "carry_of_data": (loop, "scan", "CARRY", FULL),
    "accumulator": (low(running_sum), "scan", "CARRY_ACCUMULATOR", FULL),
    "narrowed": (low(lambda h: jnp.exp(h).T @ h), "transpose", "CLEAR_NARROW", LOW),
    "broadcast_before_a_matmul": (
        low(lambda h: jnp.broadcast_to(jnp.sum(h, 0), (8, 8)) @ h),
        "broadcast_in_dim",
        "PROMOTE_FULL",
        FULL,
    ),
    "larger_of_two": (
        low(lambda h: jnp.maximum(jnp.exp(h), jnp.log(h)) @ h),
        "max",
        "PROMOTE_FULL",
        FULL,
    ),
    "row_of_a_buffer": (
        low(lambda h: lax.slice_in_dim(jnp.exp(h), 0, 1) @ h),
        "slice",
        "PROMOTE_FULL",
        FULL,
    ),
    "denominator": (low(lambda h: jnp.exp(h) / lax.logistic(h)), "logistic", "LOG_GUARD", FULL),
    "numerator": (low(lambda h: lax.logistic(h) / jnp.exp(h)), "logistic", "PROMOTE_LOW", LOW),
    "rows_before_a_matmul": (
        low(lambda h: jnp.exp(h)[np.array([0, 0, 1, 1] * 2)] @ h),
        "gather",
        "PROMOTE_FULL",
        FULL,
    ),
    "branches_read_in_both": (low(branching(jnp.exp, square)), "sub", "PROMOTE_LOW", LOW),
    "branches_read_in_either": (low(branching(square, jnp.exp)), "sub", "PROMOTE_LOW", LOW),
    "branches_read_in_float32": (low(branching(jnp.exp, jnp.log)), "sub", "NO_PRODUCT", FULL),
    "while": (low(while_loop), "while", "CARRY", FULL),
    "branches_disagree": (low(disagreeing), "cond", "BRANCH_JOIN", FULL),
    "branches_agree": (low(agreeing), "cond", "STRUCTURAL", LOW),
}


@pytest.mark.filterwarnings("ignore:autocast keeps")  # of 65,536 coordinates
@pytest.mark.parametrize(("fn", "primitive", "code", "dtype"), REASONS.values(), ids=REASONS)
def test_reasons_and_that_what_is_planned_is_emitted(fn, primitive, code, dtype):
    plan = plan_of(fn, X, computed=True, consumer=0)
    equation = planned(plan_of(fn, X), primitive)
    assert (equation.reason.code.value, equation.results[0].dtype) == (code, dtype)
    without_cause = "LOWER_PRECISION", "FP32", "STRUCTURAL", "NO_FLOAT", "NO_PRODUCT"
    assert equation.reason.cause or code in without_cause
    fn = autocast(fn, jnp.bfloat16, params=(), output_dtype="computed")
    emitted = [v.aval for v in trace(fn, X).jaxpr.outvars]
    for state, aval in zip(plan.outputs, emitted, strict=True):
        assert state.dtype == float_dtype(aval)


def test_a_reason_names_its_cause():
    causes = {
        "literal": "9.99967e-42 has no bfloat16 value",
        "coordinates": "operand 0 holds evenly spaced positions",
        "promote_full": "operand 1 is float32, computed",
        "scope": "scope full_precision",
        "unknown": unknown.name,
        "user_cast": "float32 to float16",
        "branches_disagree": "the branches disagree on result 0",
    }
    for name, cause in causes.items():
        fn, primitive, *_ = REASONS[name]
        assert planned(plan_of(fn, X), primitive).reason.cause == cause


# --- whole plans ----------------------------------------------------------------------------


def stack(n, scope=lambda i: f"layer_{i}", layer=None):
    layer = layer or jax.jit(lambda w, h: jnp.tanh(h @ w) * jax.nn.sigmoid(h))

    def fn(x, w):
        h = jnp.tanh(x @ w)
        for i in range(n):
            with jax.named_scope(scope(i)):
                h = layer(w, h)
        return h

    return fn


def layers_of(plan):
    return [p.inner[0] for eqn, p in zip(plan.jaxpr.eqns, plan.equations, strict=True) if p.inner]


@pytest.mark.parametrize("scope", [lambda i: "same", lambda i: f"layer_{i}"], ids=["same", "own"])
def test_a_layer_that_is_called_96_times_is_planned_thrice_at_most(scope):
    # The first layer and the last have other neighbors than those between.
    plans = layers_of(plan_of(stack(96, scope), X, X, leaves=(DATA, PARAM)))
    assert len(plans) == 96
    assert len({id(plan) for plan in plans}) <= 3


def test_a_layer_is_emitted_thrice_at_most():
    fn = autocast(lambda w, x: stack(8)(x, w) @ w, jnp.bfloat16, params=0)
    layers = [eqn for eqn in find(trace(fn, X, X), "jit") if find(eqn.params["jaxpr"], "logistic")]
    assert len({id(eqn.params["jaxpr"]) for eqn in layers}) <= 3


def shifted(count):
    shift = jax.jit(lambda x: x - 1.5)

    def fn(x):
        for _ in range(count):
            x = shift(x)
        return jnp.exp(x)

    return fn


@pytest.mark.parametrize("count", [0, 1, 4, 5, 9])
def test_what_is_wanted_goes_through_calls(count):
    """The needs of the results of calls are known before the calls are planned."""
    closed = trace(shifted(count), X)
    plan = Planner(BF16).plan(closed, [ValueState(LOW)], [Request()])
    assert [p.results[0].dtype for p in plan.equations] == [FULL] * (count + 1)


UNCHANGED = {
    "elementwise": lambda x: jnp.sin(x) * 2.0 + jnp.exp(x) / 3.0,
    "reductions": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-8),
    "softmax": jax.nn.softmax,
    "custom_jvp": lambda x: jax.nn.relu(x) + jax.nn.softplus(x),
    "jit": lambda x: jax.jit(lambda x, y: x * y)(x, 2.0 * x),
    "scan": running_sum,
    "while": while_loop,
    "cond": disagreeing,
    "remat": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "scatter": lambda x: x.at[0].add(x[1]),
    "linear_algebra": lambda x: jnp.linalg.cholesky(x + 9 * jnp.eye(8)),
    "sort": lambda x: (jnp.sort(x), jnp.argmax(x), lax.top_k(x, 2)),
    "integers": lambda x: jnp.arange(8) * jnp.int32(2) + x.astype(jnp.int32),
    "masks": lambda x: jnp.where(MASK, x, LOWEST),
    "highest": lambda x: jnp.dot(x, x, precision="highest"),
    "random": lambda x: x + jax.random.normal(jax.random.key(0), (8, 8)),
    "large_arange": lambda x: x[:, :3] + jnp.arange(70_000.0, 70_003.0),
    "large_iota": lambda x: lax.iota(jnp.float32, 70_000)[x[0].astype(jnp.int32)],
    "take": lambda x: jnp.take(x, jnp.arange(2) + 0, axis=0),
    "pool": lambda x: jnp.mean(x, (0, 1), keepdims=True),
}
LEVELS = [Policy("bfloat16", level=level) for level in ("tensor_cores", "o1", "compute")]


@pytest.mark.parametrize("policy", [FP16, *LEVELS], ids=repr)
@pytest.mark.parametrize("fn", UNCHANGED.values(), ids=UNCHANGED)
def test_a_program_without_16_bit_operations_is_left_alone(fn, policy):
    assert plan_of(fn, X, policy=policy).identity
    assert str(trace(autocast(fn, policy=policy), X)) == str(trace(fn, X))


@pytest.mark.parametrize("fn", [lambda x: jnp.exp(x) * 1j, lambda x: jnp.exp(1j * x)])
def test_a_complex_literal_has_no_sign(fn):
    x = jnp.asarray(0.3)
    np.testing.assert_array_equal(jax.jit(autocast(fn))(x), jax.jit(fn)(x))


def test_one_matmul_changes_a_plan():
    assert not plan_of(lambda x: x @ x, X).identity
    assert not plan_of(jax.jit(lambda x: x @ x), X).identity
    assert plan_of(low(jnp.sin), X, wanted=Request(dtype=FULL)).output_dtypes == (FULL,)


def test_a_moved_literal_is_no_copy_of_an_input():
    # The gradient of a lookup scatters into zeros, which are a literal that is broadcast.
    picked = lambda w: jax.nn.log_softmax(X @ w)[jnp.arange(8), jnp.arange(8)].mean()
    jaxpr = trace(autocast(lambda w: jax.grad(picked)(w), policy=BF16), X)
    assert find(jaxpr, "accumulate")


def test_a_product_of_two_is_raised_for_what_is_no_sum():
    """For a sum alone both factors would be kept in float32; an exponential magnifies its error."""

    def fn(w, x):
        y = x @ w
        return jnp.exp(jnp.tanh(y) * y), jnp.sin(y) * y + jnp.exp(y)

    plan = plan_of(fn, X, X)
    products = [p for eqn, p in all_equations(plan) if eqn.primitive.name == "mul"]
    assert [p.results[0].dtype for p in products] == [FULL, LOW]
