"""Guards: literals and constants that 16 bits cannot hold, and integer coordinates."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, Policy, autocast
from jmp_autocast.interpreters import ReasonCode, Source
from jmp_autocast.interpreters.plan.constant_range import constant_range
from jmp_autocast.interpreters.plan.votes import representable
from tests.support.jaxprs import find, trace
from tests.support.numerics import normal, relative_error
from tests.support.plans import (
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
MASK = np.ones((8, 8), bool)
IDS = np.ones(8, np.int32)
LITERAL = Source.LITERAL


@pytest.mark.parametrize(
    ("value", "float16", "bfloat16"),
    [
        (65504.0, True, True),
        (65519.0, True, True),
        (65520.0, False, True),
        (-65520.0, False, True),
        (1e-8, False, True),
        (6e-8, True, True),
        (1e-41, False, False),
        (1 - 1e-7, False, False),
        (-1 - 1e-7, False, False),
        (1 - 2.0**-10, True, False),
        (LOWEST, False, True),
        (-3.38e38, False, True),
        (float("inf"), True, True),
        (float("-inf"), True, True),
        (float("nan"), True, True),
        (0.0, True, True),
        (-0.0, True, True),
        (1.0, True, True),
        (-1.0, True, True),
        (0.1, True, True),
    ],
)
def test_literals_that_a_dtype_cannot_hold(value, float16, bfloat16):
    for policy, fits in ((FP16, float16), (BF16, bfloat16)):
        dtype = np.dtype(policy.compute_dtype)
        assert representable(value, dtype) is fits
        for fn in (lambda h: h * value, lambda h: jnp.where(MASK, h, value)):
            assert plan_of(low(fn), X, policy=policy).outputs[0].dtype == (dtype if fits else FULL)


SMALL, LARGE = np.float32(1.25), np.float32(2.5)
FOLDED = {name: (LARGE, SMALL) for name in ("add", "sub", "mul", "div", "max", "min")}
FOLDED |= {name: (SMALL,) for name in ("neg", "abs", "sqrt", "rsqrt", "exp", "log")}


@pytest.mark.parametrize("primitive", FOLDED)
def test_what_is_computed_from_literals_is_one(primitive):
    """Beside an activation, a scalar of which nothing is known would have a vote."""
    function, operands = getattr(lax, primitive), FOLDED[primitive]
    plan = plan_of(low(lambda h: lax.tanh(h) * function(*operands)), X)
    literals = (p for _, p in all_equations(plan) if {s.source for s in p.given} == {LITERAL})
    (state,) = next(literals).results
    assert state.known_value == pytest.approx(float(function(*operands)), rel=1e-6)
    assert plan.outputs[0].dtype == LOW


FAR = np.array([[10_001.0, 3.0, 5.0, 1e9] * 2] * 8, np.float32)
FAR_LITERALS = {
    "near": (lambda h: h + 4.0, LOW),
    "hard_swish": (lambda h: jax.nn.hard_swish(h), LOW),
    "sum": (lambda h: h + 5.0, FULL),
    "difference": (lambda h: 1000.0 - h, FULL),
    "array": (lambda h: jnp.full_like(h, 1000.0) + h, FULL),
    "beyond float32": (lambda h: h - 2.0**24, LOW),
    "factor": (lambda h: h * 1000.0, LOW),
    "exact maximum": (lambda h: jnp.maximum(h, 1000.0), LOW),
    "maximum": (lambda h: jnp.maximum(h, 10_000.0), FULL),
    "choice": (lambda h: jnp.where(MASK, h, 10_000.0), FULL),
    "mask": (lambda h: jnp.where(MASK, h, -10_000.0), LOW),
    "constants": (lambda h: jnp.where(MASK, h, FAR), FULL),
    "masks": (lambda h: jnp.where(MASK, h, -FAR), LOW),
    "clip against overflow": (lambda h: jnp.clip(h, -64_000.0, 64_000.0), LOW),
}


@pytest.mark.parametrize("name", FAR_LITERALS)
def test_literals_that_take_the_digits_of_what_they_meet(name):
    fn, expected = FAR_LITERALS[name]
    assert plan_of(low(fn), X).outputs[0].dtype == expected
    assert plan_of(low(fn), X, policy=Policy(jnp.bfloat16, level="compute")).outputs[0].dtype == LOW


@pytest.mark.parametrize("divisor", [2e4, 1e-3])
def test_a_divisor_in_float16_has_a_gradient(divisor):
    """In float16 the inverse square in it would be 0, or infinite."""
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    y = np.full(8, divisor, np.float32)
    fn = lambda y, x: jnp.sum(((x @ x) / y) @ x)
    exact = jax.grad(fn)(y, x)
    found = jax.grad(autocast(fn, policy=FP16, params=0))(y, x)
    assert np.abs(found - exact).max() < 0.002 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("value", "policy", "expected"),
    [
        (X, BF16, LOW),
        (np.where(MASK, 0, -np.inf).astype(np.float32), BF16, LOW),
        (np.triu(np.full((8, 8), LOWEST, np.float32)), BF16, LOW),
        (np.triu(np.full((8, 8), -1e30, np.float32)), BF16, LOW),
        (np.zeros((0, 8), np.float32), BF16, LOW),
        (X * np.float32(60_000), FP16, F16),
        (X * np.float32(70_000), FP16, FULL),
        (np.where(MASK, 70_000, -np.inf).astype(np.float32), FP16, FULL),
    ],
    ids=["ones", "infinite", "lowest", "large", "empty", "f16", "beyond_f16", "beyond_and_inf"],
)
def test_the_range_of_a_constant(value, policy, expected):
    rows = len(value)
    chosen = lambda h: lax.select(MASK[:rows], h[:rows], jnp.asarray(value))
    equation = planned(plan_of(low(chosen), X, policy=policy), "select_n")
    assert equation.results[0].dtype == expected
    assert equation.reason.code is (
        ReasonCode.LITERAL if expected == FULL else ReasonCode.PROMOTE_LOW
    )


MOVED = [lambda w: w, lambda w: w.T[::-1], jax.jit(lambda w: w.reshape(8, 8))]


@pytest.mark.parametrize(
    ("policy", "value", "expected"),
    [(FP16, 60_000, F16), (FP16, 70_000, FULL), (BF16, 70_000, LOW), (BF16, LOWEST, LOW)],
)
@pytest.mark.parametrize("moved", MOVED, ids=["as_it_is", "moved", "through_jit"])
def test_the_range_of_a_constant_in_a_matmul(moved, policy, value, expected):
    """What exceeds bfloat16 makes a product exceed float32, so only float16 is guarded."""
    constant = jnp.asarray(X * np.float32(value))
    equation = planned(plan_of(lambda x: x @ moved(constant), X, policy=policy), "dot_general")
    assert equation.results[0].dtype == expected
    assert equation.reason.code is (
        ReasonCode.LITERAL if expected == FULL else ReasonCode.LOWER_PRECISION
    )


def test_an_extent_says_which_dtypes_it_exceeds():
    big, bigger = (
        constant_range(np.float32([1, 70_000])),
        constant_range(np.float32([LOWEST, np.inf])),
    )
    assert big.found.exceeds == {F16}
    assert bigger.found.exceeds == {F16}
    assert bigger.is_clamped()
    assert not big.is_clamped()
    assert constant_range(np.float32([0, 1e5])) == big != bigger
    assert hash(constant_range(np.float32([0, 1e5]))) == hash(big)
    assert constant_range(np.float32([np.inf])).found.exceeds == frozenset()
    assert constant_range(np.int32([1])) is None


def count(n):
    return lax.iota(jnp.int32, n)


@pytest.mark.parametrize(
    ("fn", "are_positions"),
    [
        (lambda: count(100), True),
        (lambda: count(100) + 5, True),
        (lambda: 3 * count(100), True),
        (lambda: 3 * (count(100) - 50), True),
        (lambda: -count(100), True),
        (lambda: count(100).reshape(10, 10).T[2], True),
        (lambda: count(100).astype(jnp.float32), True),
        (lambda: jnp.concatenate([count(100), count(7)]), True),
        (lambda: jnp.maximum(count(100), 50), True),
        (lambda: jax.jit(lambda n: n + 1)(count(100)), True),
        (lambda: jnp.sin(count(100).astype(jnp.float32)), False),
        (lambda: count(100) > 3, False),
    ],
)
def test_which_integers_are_positions(fn, are_positions):
    product = lambda w: fn().astype(jnp.float32)[-8:] @ jnp.tanh(w @ w)
    *_, equation = [
        p for e, p in all_equations(plan_of(product, X)) if e.primitive.name == "dot_general"
    ]
    assert (equation.reason.code is ReasonCode.COORD) == are_positions


def test_a_count_that_divides_is_no_coordinate():
    """The backward pass of a mean over the elements of a mask."""

    def loss(w, x, mask):
        rows = jnp.sum(jnp.tanh(x @ w) ** 2, -1)
        return jnp.sum(jnp.where(mask > 0, rows, 0.0)) / jnp.sum(mask).astype(jnp.float32)

    plan = plan_of(jax.grad(loss), X, X, IDS)
    dots = [p for eqn, p in all_equations(plan) if eqn.primitive.name == "dot_general"]
    assert [dot.results[0].dtype for dot in dots] == [LOW, LOW]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("int8", LOW), ("uint8", LOW), ("int16", FULL), ("uint16", FULL), ("int32", FULL)],
)
def test_positions_given_as_data_have_no_bound(dtype, expected):
    """Up to 256 they are exact in 16 bits, like bools."""
    angles = lambda ids, f: ids.astype(jnp.float32).reshape(4, 2) @ (f @ f)[:2]
    equation = planned(plan_of(angles, IDS.astype(dtype), X), "dot_general")
    code = ReasonCode.COORD if expected == FULL else ReasonCode.LOWER_PRECISION
    assert (equation.reason.code, equation.results[0].dtype) == (code, expected)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint32"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda ids, x: ids.astype(jnp.float32) @ x,
        lambda ids, x: (x @ x * ids.astype(jnp.float32)) @ x,
        lambda ids, x: ((ids.astype(jnp.float32) - 8.0) * x[0]) @ x,
        lambda ids, x: jax.vmap(lambda i, x: i.astype(jnp.float32) @ x, (0, None))(ids, x),
        lambda ids, x: (1.0 - ids.astype(jnp.float32)) @ x,
    ],
    ids=["one_hot", "mask_of_activations", "packed_weight", "vmapped", "complement"],
)
def test_integers_that_are_summed_are_no_positions(fn, dtype):
    plan = plan_of(fn, np.ones((8, 8), dtype), X)
    dots = [p for eqn, p in all_equations(plan) if eqn.primitive.name == "dot_general"]
    assert [dot.results[0].dtype for dot in dots] == [LOW] * len(dots)


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda t, f: t[:, None] @ f[None],
        lambda t, f: jnp.einsum("t,d->td", t, f),
        lambda t, f: jax.vmap(lambda t: t[:, None] @ f[None])(t[None]),
        lambda t, f: jnp.einsum("bt,d->btd", jnp.cumsum(t)[None], f),
        lambda t, f: jnp.stack([t] * 3, 1) @ jnp.stack([f] * 3),
    ],
    ids=["matmul", "einsum", "vmapped_outer", "cumulative", "three_coordinates"],
)
def test_an_outer_product_of_positions_is_one_of_elements(fn, policy):
    equation = planned(plan_of(fn, np.ones(64, np.float32), X[0], policy=policy), "dot_general")
    assert equation.results[0].dtype == FULL


COORDINATES = {
    "first operand": (lambda x: lax.iota(jnp.float32, 64).reshape(8, 8) @ x, "COORD"),
    "second operand": (lambda x: x @ lax.iota(jnp.float32, 64).reshape(8, 8), "COORD"),
    "cast up": (lambda x: lax.iota(F16, 64).astype(FULL).reshape(8, 8) @ x, "COORD"),
    # Exact integers do not help: their product with a frequency is rounded, an angle of 255 by half
    # a radian.
    **{f"{n} angles": (positions(n), "COORD") for n in (3, 256, 2048)},
    # A frequency may be as large as the range: phases of `linspace` were 1.5 to 17 % off.
    "normalised": (lambda x: (lax.iota(jnp.float32, 24) / 23.0).reshape(3, 8) @ x, "COORD"),
    "times data": (lambda x: (lax.iota(jnp.float32, 64)[:, None] * x[0]) @ x, "LOWER_PRECISION"),
    # A head with one output, say: the result is not larger than both operands.
    "one feature": (lambda x: x @ x[:, :1], "LOWER_PRECISION"),
}


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("fn", "code"), COORDINATES.values(), ids=COORDINATES)
def test_products_with_coordinates(fn, code, policy):
    equation = planned(plan_of(fn, X, policy=policy), "dot_general")
    expected = FULL if code == "COORD" else policy.compute_dtype
    assert (equation.reason.code.value, equation.results[0].dtype) == (code, expected)


@pytest.mark.parametrize(("policy", "dtype"), [(FP16, "float32"), (BF16, "bfloat16")])
def test_a_parameter_that_a_literal_takes_out_of_range_is_float32(policy, dtype):
    def fn(w, x):
        return jnp.tanh((x @ w) * (w * 1e5) * 1e-7) @ w

    low = autocast(fn, policy=policy, params=0)
    (tanh,) = find(trace(low, X, X), "tanh")
    assert tanh.invars[0].aval.dtype == dtype
    np.testing.assert_allclose(low(-X, X), fn(-X, X), rtol=1e-2)


# --- numbers that a function closes over as arrays of no dimension, which are no literals

PAIR = tuple(normal(0, w=(8, 8), x=(4, 8)).values())
OPERATIONS = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "maximum": jnp.maximum,
    "where": lambda y, number: jnp.where(y > 0, y, number),
}


@pytest.mark.parametrize(("dtype", "level"), [("bfloat16", "o1"), ("float16", "compute")])
@pytest.mark.parametrize("number", [0.5, -0.0, 3.0, 700.0, -700.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_number_closed_over_is_a_constant_of_one_element(name, number, dtype, level):
    constant = jnp.asarray(number, jnp.float32)

    def fn(w, x):
        y = x @ w
        # Divided by 0 it would be infinite in float32, too.
        return OPERATIONS[name](y, constant if number or name != "divide" else constant + 1)

    mixed = autocast(fn, policy=Policy(dtype, level=level))
    assert constant.shape == ()
    assert relative_error(mixed(*PAIR), fn(*PAIR)) < 2e-2
    gradients = (jax.grad(lambda w, f=f: jnp.sum(f(w, PAIR[1])))(PAIR[0]) for f in (mixed, fn))
    assert relative_error(*gradients) < 2e-2


@pytest.mark.parametrize("number", [0.5, 3.0, 700.0, 1e5, -1e5, np.inf, np.nan])
def test_a_number_has_the_range_of_an_array_that_holds_it(number):
    found, expected = (constant_range(np.full(s, number, np.float32)) for s in ((), (1,)))
    assert found == expected


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_nan_of_the_program_raises_no_warning(dtype):
    def fn(x, y):  # the search compares with a NaN of the dtype
        return jnp.searchsorted(jnp.sort(x), y)

    x = np.arange(4).astype(dtype)
    np.testing.assert_array_equal(autocast(fn, policy=BF16)(x, x), fn(x, x))


def test_a_mean_by_an_inner_product_with_ones_is_planned():
    def variance(x):  # `jnp.ones` holds the elements of a literal
        mean = jnp.ones(16) @ x / 16
        return jnp.ones(16) @ jnp.square(x) / 16 - jnp.square(mean)

    x = jnp.arange(16.0) + 100
    np.testing.assert_allclose(autocast(variance, policy=BF16)(x), 21.25, rtol=1e-3)
