"""The scenarios of TensorFlow's auto_mixed_precision (30-44)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast.interpreters.compat import scan_split
from tests.support.compiler_programs import (
    COMBINATIONS,
    DTYPES,
    LEVELS,
    X,
    cast,
    conv,
    executed,
    of,
    relu,
    result_dtypes,
    round_trips,
    works,
)
from tests.support.jaxprs import assert_dots_run_in, casts, dtypes, find, open_jaxpr, trace

in_combinations = pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)

W, MASK = of(6, 6) / 2, of(6, 6, seed=3) > 0


# --- already low --------------------------------------------------------------------------------

LOW_PROGRAMS = {
    "dense": lambda w, x: relu(x @ w + w[0]),
    "convolution": lambda w, x: jnp.abs(conv(x[None, None], w[None, None, :3, :3])),
    "gate": lambda w, x: jnp.tanh(x @ w) * jax.nn.sigmoid(x @ w),
    "residual": lambda w, x: x + jnp.tanh(x @ w),
    "loop": lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w), h), x, None, length=2),
    "branches": lambda w, x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x @ w),
}


@in_combinations
@pytest.mark.parametrize("fn", LOW_PROGRAMS.values(), ids=LOW_PROGRAMS)
def test_a_low_program_is_left_alone(fn, dtype, level):
    """31: at each level; what the program itself declares in 16 bits is not cast up."""
    w, x = jnp.asarray(W, dtype), jnp.asarray(of(6, 6), dtype)
    assert str(trace(cast(fn, dtype, level), w, x)) == str(trace(fn, w, x))


# --- what only moves elements -------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "level"), [(d, e) for d in DTYPES for e in ("o1", "compute")])
def test_relus_on_both_sides_of_a_product(dtype, level):
    """32: those next to it are low, and the others between fragile operations float32."""
    fn = lambda w, x: relu(jnp.log(relu(relu(jnp.sqrt(relu(jnp.exp(x)))) @ w)))
    jaxpr = trace(cast(fn, dtype, level), W, X[0, 0])
    assert result_dtypes(jaxpr, "max") == ["float32", dtype, dtype, "float32"]
    assert result_dtypes(jaxpr, "exp", "sqrt", "log") == ["float32"] * 3
    assert_dots_run_in(dtype, jaxpr)


@pytest.mark.parametrize("level", LEVELS)
def test_a_relu_for_a_product_and_a_shape(level):
    """33: one cast of the input, none of the relu."""

    def fn(w, x):
        h = relu(jnp.exp(x))
        return h @ w, h.reshape(4, 9)[::-1].T.astype(jnp.int32)

    jaxpr = trace(cast(fn, level=level, params=0), W, X[0, 0])
    assert len(casts(jaxpr, "float32", "bfloat16")) == 2  # and the weight
    assert not round_trips(jaxpr)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_returned_keeps_its_value(level):
    """34: an intermediate that is an output too is exact, although a product reads it."""
    fn = lambda w, x: (h := relu(jnp.exp(x)), h @ w)
    low = cast(fn, level=level, params=0)
    jaxpr = trace(low, W, W)
    assert result_dtypes(jaxpr, "max") == ["float32"]
    assert jax.eval_shape(low, W, W) == jax.eval_shape(fn, W, W)
    found, expected = (jax.jit(f)(W, W)[0] for f in (low, fn))
    np.testing.assert_array_equal(found, expected)


NUMBERS = {
    "bool": (MASK, lambda m: m.astype(jnp.float32)),
    "bytes": (MASK.astype(np.uint8), lambda m: m.astype(jnp.float32)),
    "comparison": (W, lambda x: (x > 0).astype(jnp.float32)),
    "one_hot": (np.arange(6)[:, None], lambda i: (i == np.arange(6)).astype(jnp.float32)),
}


@in_combinations
@pytest.mark.parametrize(("x", "to_float"), NUMBERS.values(), ids=NUMBERS)
def test_the_programs_own_cast_for_a_product(x, to_float, dtype, level):
    """35: bool to float32 for products alone becomes bool to 16 bits."""
    low = cast(lambda w, x: (h := to_float(x), h @ w, h @ w.T)[1:], dtype, level, params=0)
    jaxpr = trace(low, W, x)
    assert_dots_run_in(dtype, jaxpr)
    found = [
        dtypes((*eqn.invars, *eqn.outvars))
        for eqn in executed(jaxpr)
        if eqn.primitive.name == "convert_element_type"
    ]
    of_numbers = [target for source, target in found if source not in ("float32", dtype)]
    assert of_numbers == [dtype]
    assert len(found) == 4  # the numbers, the weight, and the results on return


# --- loops and buffers --------------------------------------------------------------------------


def test_the_carry_and_what_is_stacked_agree():
    """36 and 37: a float32 start, a low body; the carry that is stacked is the same value."""

    def fn(w, x):
        def step(c, _):
            new = jnp.tanh(c @ w)
            return new, (c, new)

        return lax.scan(step, x, None, length=3)

    jaxpr = trace(cast(fn, params=0, output_dtype="computed"), W, W)
    (scan,) = find(jaxpr, "scan")
    body = open_jaxpr(scan.params["jaxpr"])
    carry, before, after = dtypes(scan.outvars)
    assert (carry, before) == ("float32", "float32")
    assert dtypes(body.outvars) == (carry, before, after)
    consts, _ = scan_split(scan.params)
    assert body.invars[consts].aval.dtype == carry
    values = jax.jit(cast(fn, params=0))(W, W)
    np.testing.assert_allclose(values[0], values[1][1][-1], rtol=2**-8)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loop", ["scan", "fori"])
def test_a_buffer_in_a_carry(loop, level):
    """38: written in one step, read in the next: reader and writer see one dtype."""

    def fn(w, x):
        def step(i, buffer):
            row = jnp.tanh(lax.dynamic_slice(buffer, (i, 0), (1, 6)) @ w)
            return lax.dynamic_update_slice(buffer, row, (i + 1, 0))

        start = jnp.zeros((4, 6)).at[0].set(x)
        if loop == "fori":
            return lax.fori_loop(0, 3, step, start)
        return lax.scan(lambda c, i: (step(i, c), None), start, jnp.arange(3))[0]

    low = cast(fn, level=level, params=0, output_dtype="computed")
    jaxpr = trace(low, W, W[0])
    assert_dots_run_in("bfloat16", jaxpr)
    (read,), (write,) = find(jaxpr, "dynamic_slice"), find(jaxpr, "dynamic_update_slice")
    seen = {*dtypes(read.invars[:1]), *dtypes(write.invars[:1]), *dtypes(write.outvars)}
    assert len(seen) == 1
    found, expected = jax.jit(low)(W, W[0]), jax.jit(fn)(W, W[0])
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=3e-2)


@pytest.mark.parametrize("level", LEVELS)
def test_a_buffer_for_a_kept_function(level):
    """39: what a kernel of a foreign dtype reads and writes stays float32 on both sides."""

    def fn(w, x):
        buffer = lax.dynamic_update_slice(jnp.zeros((4, 6)), jnp.tanh(x @ w)[:2], (0, 0))
        kept = jax.pure_callback(lambda b: b, jax.ShapeDtypeStruct((4, 6), jnp.float32), buffer)
        return lax.dynamic_update_slice(kept, kept[:2], (2, 0)) @ w

    jaxpr = trace(cast(fn, level=level, params=0), W, W)
    (call,) = find(jaxpr, "pure_callback")
    assert dtypes((*call.invars, *call.outvars)) == ("float32",) * 2
    assert result_dtypes(jaxpr, "dynamic_update_slice")[1] == "float32"
    assert not round_trips(jaxpr)
    assert_dots_run_in("bfloat16", jaxpr)


# --- operands of one operation ------------------------------------------------------------------


@in_combinations
def test_operands_of_a_list_agree(dtype, level):
    """41: three low values make a low list, a float32 one among them a float32 list."""
    low = lambda w, x: jnp.concatenate([x @ w, w @ x, x @ x])
    mixed = lambda w, x: jnp.concatenate([x @ w, jnp.exp(x), x @ x])
    of_low = "float32" if level == "tensor_cores" else dtype
    for fn, expected in ((low, of_low), (mixed, "float32")):
        jaxpr = trace(cast(fn, dtype, level, output_dtype="computed"), W, W)
        (eqn,) = find(jaxpr, "concatenate")
        assert set(dtypes((*eqn.invars, *eqn.outvars))) == {expected}


def test_sums_of_cotangents_agree():
    """41: `add_any`, where a low value with a float32 and two low readers is differentiated."""

    def loss(w, x):
        h = jnp.tanh(x @ w)
        return jnp.sum((h @ w) * (h @ w.T)) + jnp.sum(jnp.exp(h))

    jaxpr = trace(cast(jax.grad(loss), params=0), W, W)
    sums = find(jaxpr, "add_any")
    assert len(sums) >= 4
    for eqn in sums:
        assert set(dtypes((*eqn.invars, *eqn.outvars))) == {"float32"}


# --- unary operations ---------------------------------------------------------------------------

INFER = {
    "elu": (jax.nn.elu, None),
    "erf": (lax.erf, "erf"),
    "erfc": (lax.erfc, "erfc"),
    "inv": (lambda h: 1 / (2 + jnp.abs(h)), None),
    "log1p": (lambda h: jnp.log1p(jnp.abs(h)), None),
    "log_softmax": (jax.nn.log_softmax, None),
    "sigmoid": (jax.nn.sigmoid, "logistic"),
    "softmax": (jax.nn.softmax, None),
    "softplus": (jax.nn.softplus, None),
    "sqrt": (lambda h: jnp.sqrt(jnp.abs(h)), "sqrt"),
    "tanh": (jnp.tanh, "tanh"),
}

FLOAT32_INSIDE = {"exp", "expm1", "exp2", "log", "log1p", "reduce_sum"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("function", "low"), INFER.values(), ids=INFER)
def test_a_unary_operation_between_products(function, low, dtype):
    """42: within TensorFlow's tolerances; exponentials and logarithms are float32."""
    fn = lambda w, x: function(x @ w) @ w
    w, x = of(6, 6, seed=5) / 8, of(6, 6, seed=6) / 2
    jaxpr = trace(cast(fn, dtype, params=0), w, x)
    assert_dots_run_in(dtype, jaxpr)
    assert not round_trips(jaxpr)
    found = dict(works(jaxpr))
    assert {found[name] for name in FLOAT32_INSIDE & set(found)} <= {"float32"}
    if low is not None:
        assert found[low] == dtype
    # TensorFlow's are for float16; bfloat16 has eight times the rounding error.
    scale = 1 if dtype == "float16" else 8
    found, expected = (np.asarray(jax.jit(f)(w, x)) for f in (cast(fn, dtype, params=0), fn))
    np.testing.assert_allclose(found, expected, atol=2e-3 * scale, rtol=1e-2)


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["o1", "compute"])
def test_the_sum_for_a_bias_raises_no_gradient(level):
    """43: the whole step is seen; the float32 sum of a bias gradient is a leaf of the graph."""

    def loss(params, x):
        h = jax.nn.relu(x @ params["a"] + params["bias"])
        return jnp.sum((jax.nn.relu(h @ params["b"] + params["bias"]) @ params["a"]) * 0.5)

    params = {"a": W, "b": W.T, "bias": of(6)}
    with jax.check_tracer_leaks(False):  # custom rules are slow under it
        jaxpr = trace(cast(jax.grad(loss), level=level), params, of(8, 6))
    assert_dots_run_in("bfloat16", jaxpr)
    assert set(result_dtypes(jaxpr, "reduce_sum")) == {"float32"}
    # The gradients through both relus are 16-bit: they are the operands of the products.
    assert result_dtypes(jaxpr, "select_n") == ["bfloat16"] * 2
    assert not round_trips(jaxpr)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loop", ["scan", "fori", "while"])
def test_variables_of_a_training_loop_are_exact(loop, level):
    """44: an update of a thousandth of an ulp of bfloat16 is not lost, 256 times."""
    x = np.eye(4, dtype=np.float32)

    def train(w):
        step = lambda w: w - 2.0**-16 * jax.grad(lambda w: jnp.sum(x @ w))(w)
        if loop == "scan":
            return lax.scan(lambda w, _: (step(w), None), w, None, length=256)[0]
        if loop == "fori":
            return lax.fori_loop(0, 256, lambda _, w: step(w), w)
        return lax.while_loop(lambda s: s[0] < 256, lambda s: (s[0] + 1, step(s[1])), (0, w))[1]

    start = np.full((4, 4), 1.5, np.float32)
    low = cast(train, level=level, params=0)
    assert_dots_run_in("bfloat16", trace(low, start))
    np.testing.assert_array_equal(jax.jit(low)(start), np.full((4, 4), 1.5 - 2.0**-8))
