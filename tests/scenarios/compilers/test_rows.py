"""The scenarios of compilers' mixed-precision passes, a row each, with their numbers.

TVM's Relay (1-18) and Relax (19-29), TensorFlow's auto_mixed_precision (30-44), and ModelOpt's
AutoCast with onnxconverter-common (45-59). What is not here is tested elsewhere: parameters that
are low already (28) are a case of 31, carries and what is stacked (36, 37) are in ``loops``, unary
operations (42) in ``conformance``, derivatives (62-82) in `test_autodiff` and `test_models`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast
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
    executed,
    of,
    relu,
    round_trips,
    silu,
    softmax,
)
from tests.support.jaxprs import assert_dots_run_in, dtypes, find, trace

W, MASK = of(6, 6, seed=2), of(6, 6, seed=3) > 0
PARAMS = {"w": W, "bias": of(6)}
# Where the planner decides more than the dtypes of products.
WIDE = [pair for pair in COMBINATIONS if pair[1] != "tensor_cores"]
CORES = [("bfloat16", "tensor_cores")]


class Row(NamedTuple):
    """A program, and the dtypes that it gets in each of some (dtype, level).

    ``results`` and ``reads`` hold, by primitive, the dtypes of first results and of operands, in
    order: one word is for all; "low" is the compute dtype and "full" float32. ``down`` and ``up``
    count the casts from float32 to it and back.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    results: dict[str, str] = {}  # noqa: RUF012
    reads: dict[str, str] = {}  # noqa: RUF012
    down: int | None = None
    up: int | None = None
    where: list[tuple[str, str]] = COMBINATIONS
    options: dict[str, Any] = {}  # noqa: RUF012


def both_ways(wrap):
    first, second = wrap(lambda x, k: conv(x, k)), wrap(lambda h, k: conv(jnp.tanh(h), k))
    return lambda x, k: second(first(x, k), k)


def between_and_full(x, k):
    first = relu(jnp.exp(x))
    return relu(conv(first, k)), jnp.exp(first)


def opaque(x):
    y = (x @ x).astype(jnp.float16)
    return jax.pure_callback(np.abs, jax.ShapeDtypeStruct(y.shape, jnp.float16), y)


def sliced(w, x, i):
    h = lax.dynamic_slice(x @ w, (i, 0), (3, 6))
    return h @ w, jnp.exp(h)


def product_and_softmax(make):
    return lambda w, x: (v := make(x), v @ w + v.T @ w, softmax(v), jnp.log(v))[1:]


def product_and_shape(w, x):
    h = relu(jnp.exp(x))
    return h @ w, h.reshape(4, 9)[::-1].T.astype(jnp.int32)


def kept_buffer(w, x):
    buffer = lax.dynamic_update_slice(jnp.zeros((4, 6)), jnp.tanh(x @ w)[:2], (0, 0))
    kept = jax.pure_callback(lambda b: b, jax.ShapeDtypeStruct((4, 6), jnp.float32), buffer)
    return lax.dynamic_update_slice(kept, kept[:2], (2, 0)) @ w


def read_thrice(w, x):
    h = jnp.tanh(x @ w)
    return jnp.sum((h @ w) * (h @ w.T)) + jnp.sum(jnp.exp(h))


def two_layers(params, x):
    h = jax.nn.relu(x @ params["w"] + params["bias"])
    return jnp.sum((jax.nn.relu(h @ params["w"].T + params["bias"]) @ params["w"]) * 0.5)


def layer_norm(w, x, scale, bias):
    x = x @ w
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return ((x - mean) / jnp.sqrt(variance + 1e-6) * scale + bias) @ w


def in_one_another(w, x):
    layer = jax.jit(lambda w, h: jnp.tanh(h @ w))
    step = lambda h, _: (lax.cond(h[0, 0] > 0, layer, lambda w, h: h, w, h), None)
    return lax.fori_loop(0, 2, lambda _, h: lax.scan(step, h, None, length=2)[0], x)


def users_cast(w, x):
    full = (x @ w).astype(jnp.bfloat16).astype(jnp.float32)
    return full * (x @ w), (w @ x) - full


BETWEEN = {
    "relu": relu,
    "tanh": jnp.tanh,
    "abs": jnp.abs,
    "reshape": lambda h: h.reshape(1, 4, 9, 4),
}
CLIPPED = lambda x: jnp.clip(jnp.tanh(x @ x), min=-70_000.0, max=70_000.0)
LISTS = {
    "low": lambda w, x: jnp.concatenate([x @ w, w @ x, x @ x]),
    "mixed": lambda w, x: jnp.concatenate([x @ w, jnp.exp(x), x @ x]),
}
ADD_AND_SILU = {"add": "low", "logistic": "low", "mul": "low"}
FULL_NORM = dict.fromkeys(("reduce_sum", "square", "sub", "sqrt", "mul", "add"), "full")
EXP = {"input": lambda x: x, "computed": jnp.exp}

ROWS = {
    "1 convolution": Row(conv, (X, KERNEL), down=2, up=1),
    "2 affine map behind it": Row(
        lambda x, k, scale, bias: affine(conv(x, k), scale, bias),
        (X, KERNEL, of(4), of(4)),
        {"mul": "low", "add": "low"},
        up=0,
        where=WIDE,
        options={"params": (2, 3), "output_dtype": "computed"},
    ),
    "6 sum of convolutions": Row(
        lambda x, k: conv(x, k) + (conv(x, k) + conv(x, k)),
        (X, KERNEL),
        {"add": "low"},
        down=2,
        up=0,
        where=WIDE,
        options={"output_dtype": "computed"},
    ),
    "7 softmax": Row(
        lambda x, k: softmax(conv(x, k)),
        (X, KERNEL),
        dict.fromkeys(("reduce_max", "sub", "exp", "reduce_sum", "div"), "full"),
        down=2,
        up=1,
    ),
    **{
        f"9 through {wrap.__name__}": Row(
            both_ways(wrap),
            (X, KERNEL),
            {"tanh": "low"},
            up=1,
            where=WIDE[:1],
            options={"params": 1},
        )
        for wrap in (jax.jit, jax.checkpoint)
    },
    "10 branches of a where": Row(
        lambda data, w: jnp.where(data > 0.5, data @ w, jnp.tanh(data @ w)),
        (W, W),
        reads={"select_n": "bool low low", "gt": "full full"},
        where=WIDE,
        options={"params": 1},
    ),
    "13 clip in the range": Row(
        CLIPPED, (W,), {"tanh": "low", "max": "low", "min": "low"}, up=1, where=WIDE[:2]
    ),
    "14 clip out of the range": Row(
        CLIPPED, (W,), {"tanh": "low", "max": "full", "min": "full"}, up=1, where=WIDE[2:]
    ),
    "19 relu for float32, too": Row(
        between_and_full,
        (X, KERNEL),
        {"max": "full low"},
        up=1,
        where=WIDE[:1],
        options={"params": 1},
    ),
    "19 relu for a convolution alone": Row(
        lambda x, k: conv(relu(jnp.exp(x)), k),
        (X, KERNEL),
        {"max": "low"},
        where=WIDE,
        options={"params": 1},
    ),
    **{
        f"20 {name} between convolutions": Row(
            lambda x, k, f=f: conv(f(conv(x, k)), k),
            (X, KERNEL),
            down=2,
            up=1,
            where=WIDE,
            options={"params": 1},
        )
        for name, f in BETWEEN.items()
    },
    "21 bias given": Row(
        lambda p, x: silu(x @ p["w"] + p["bias"]), (PARAMS, W), ADD_AND_SILU, where=WIDE
    ),
    "21 bias closed over": Row(
        lambda p, x: silu(x @ p["w"] + PARAMS["bias"]), (PARAMS, W), ADD_AND_SILU, where=WIDE
    ),
    **{
        f"23 concatenated before the cast, {name}": Row(
            lambda w, x, y, f=f: jnp.concatenate([f(x), f(y)]) @ w,
            (W, W, 2 * W),
            {"concatenate": "full"},
            down=2,  # the concatenation and the weight
            options={"params": 0},
        )
        for name, f in EXP.items()
    },
    **{
        f"24, 51 for a product and a softmax, {name}": Row(
            product_and_softmax(f),
            (W, np.abs(W)),
            reads={"exp": "full", "log": "full", "reduce_max": "full"},
            down=2,  # the value and the weight
            options={"params": 0},
        )
        for name, f in EXP.items()
    },
    "26 opaque call of float16": Row(
        opaque, (W,), {"pure_callback": "float16"}, {"pure_callback": "float16"}, down=1
    ),
    "27 slice of a product": Row(
        sliced, (W, W, np.int32(1)), {"dynamic_slice": "low"}, up=2, options={"params": 0}
    ),
    "32 relus on both sides": Row(
        lambda w, x: relu(jnp.log(relu(relu(jnp.sqrt(relu(jnp.exp(x)))) @ w))),
        (W, X[0, 0]),
        {"max": "full low low full", "exp": "full", "sqrt": "full", "log": "full"},
        where=WIDE,
    ),
    "33 relu for a product and a shape": Row(
        product_and_shape, (W, X[0, 0]), down=2, options={"params": 0}
    ),
    "34 returned, too": Row(
        lambda w, x: (h := relu(jnp.exp(x)), h @ w), (W, W), {"max": "full"}, options={"params": 0}
    ),
    "39 buffer for a kept function": Row(
        kept_buffer,
        (W, W),
        {"pure_callback": "full", "dynamic_update_slice": "low full"},
        {"pure_callback": "full"},
        where=WIDE,
        options={"params": 0},
    ),
    **{
        f"41 {name} list": Row(
            fn,
            (W, W),
            {"concatenate": dtype},
            where=where,
            options={"params": 0, "output_dtype": "computed"},
        )
        for name, fn, dtype, where in (
            ("low", LISTS["low"], "low", WIDE),
            ("raised", LISTS["low"], "full", CORES),
            ("mixed", LISTS["mixed"], "full", COMBINATIONS),
        )
    },
    "41 sums of cotangents": Row(
        jax.grad(read_thrice),
        (W, W),
        {"add_any": "full"},
        {"add_any": "full full"},
        where=WIDE[:1],
        options={"params": 0},
    ),
    "43 the sum for a bias": Row(
        jax.grad(two_layers),
        (PARAMS, of(8, 6)),
        {"reduce_sum": "full", "select_n": "low"},  # what the products read stays low
        where=WIDE,
    ),
    "52 parameter of both classes": Row(
        lambda params, x: x @ params["w"] @ params["w"] + jnp.exp(params["w"]),
        (PARAMS, W),
        {"exp": "full"},
        down=2,  # each once: the input and the parameter
    ),
    "57 layer norm": Row(layer_norm, (W, of(3, 6), of(6), of(6)), FULL_NORM, down=3, up=2),
    "59 in one another": Row(
        in_one_another, (W, W), {"tanh": "low"}, where=WIDE, options={"params": 0}
    ),
    "59 in one another, raised": Row(
        in_one_another, (W, W), {"tanh": "full"}, where=CORES, options={"params": 0}
    ),
    "62 a user's cast to float32 votes": Row(
        users_cast,
        (W, W),
        {"mul": "full", "sub": "full"},
        where=COMBINATIONS[:3],
        options={"output_dtype": "computed"},
    ),
}


def assert_in_order(found, expected, dtype):
    """The dtypes of equations; one word stands for all."""
    expected = [{"low": dtype, "full": "float32"}.get(word, word) for word in expected.split()]
    assert found
    assert found == (expected * len(found) if len(expected) == 1 else expected)


CASES = [(name, *pair) for name, row in ROWS.items() for pair in row.where]


@pytest.mark.parametrize(("name", "dtype", "level"), CASES, ids=[", ".join(c) for c in CASES])
def test_dtypes_and_casts(name, dtype, level):
    row = ROWS[name]
    low = cast(row.fn, dtype, level, **row.options)
    with jax.check_tracer_leaks(False):  # custom rules are slow under it
        jaxpr = trace(low, *row.args)
    assert_dots_run_in(dtype, jaxpr)
    assert not round_trips(jaxpr)
    for primitive, expected in row.results.items():
        results = [eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, primitive)]
        assert_in_order(results, expected, dtype)
    for primitive, expected in row.reads.items():
        for eqn in find(jaxpr, primitive):
            assert_in_order(list(dtypes(eqn.invars)), expected, dtype)
    casts = all_casts(jaxpr)
    assert row.down is None or casts.count(("float32", dtype)) == row.down
    assert row.up is None or casts.count((dtype, "float32")) == row.up


# --- what needs more than dtypes ----------------------------------------------------------------

LOW_PROGRAMS = {
    "dense": lambda w, x: relu(x @ w + w[0]),
    "convolution": lambda w, x: jnp.abs(conv(x[None, None], w[None, None, :3, :3])),
    "gate": lambda w, x: jnp.tanh(x @ w) * jax.nn.sigmoid(x @ w),
    "residual": lambda w, x: x + jnp.tanh(x @ w),
    "loop": lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w), h), x, None, length=2),
    "branches": lambda w, x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x @ w),
}


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
@pytest.mark.parametrize("fn", LOW_PROGRAMS.values(), ids=LOW_PROGRAMS)
def test_a_low_program_is_left_alone(fn, dtype, level):
    """31: at each level; what the program itself declares in 16 bits is not cast up."""
    w, x = jnp.asarray(W, dtype), jnp.asarray(of(6, 6), dtype)
    assert str(trace(cast(fn, dtype, level), w, x)) == str(trace(fn, w, x))


NUMBERS = {
    "bool": (MASK, lambda m: m.astype(jnp.float32)),
    "bytes": (MASK.astype(np.uint8), lambda m: m.astype(jnp.float32)),
    "comparison": (W, lambda x: (x > 0).astype(jnp.float32)),
    "one_hot": (np.arange(6)[:, None], lambda i: (i == np.arange(6)).astype(jnp.float32)),
}


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
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
    jaxpr = trace(low, W / 2, W[0])
    assert_dots_run_in("bfloat16", jaxpr)
    (read,), (write,) = find(jaxpr, "dynamic_slice"), find(jaxpr, "dynamic_update_slice")
    seen = {*dtypes(read.invars[:1]), *dtypes(write.invars[:1]), *dtypes(write.outvars)}
    assert len(seen) == 1
    found, expected = jax.jit(low)(W / 2, W[0]), jax.jit(fn)(W / 2, W[0])
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=3e-2)


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


EMPTY = {
    "rows": (of(0, 6), W),
    "contraction": (of(3, 0), of(0, 6)),
    "columns": (of(3, 6), of(6, 0)),
    "batch": (of(0, 3, 6), of(0, 6, 2)),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("args", EMPTY.values(), ids=EMPTY)
def test_arrays_without_elements(args, level):
    """53: also as constants."""
    fn = lambda x, w: relu(x @ w + jnp.zeros(w.shape[-1])) / 2
    given, closed = cast(fn, level=level), cast(lambda: fn(*args), level=level)
    assert_dots_run_in("bfloat16", trace(given, *args))
    *found, expected = jax.jit(lambda *args: (given(*args), closed(), fn(*args)))(*args)
    for out in found:
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output_dtype", ["same", "computed"])
def test_an_input_that_is_an_output(output_dtype, dtype):
    """55: as it is, or in the program's own cast, beside a product that reads it low."""
    other = "float16" if dtype == "bfloat16" else "bfloat16"
    fn = lambda w, x: (x, x.astype(dtype), x.astype(other), x.astype(jnp.int32), w, x @ w)
    jaxpr = trace(autocast(fn, compute_dtype=dtype, output_dtype=output_dtype), W, W).jaxpr
    assert [jaxpr.outvars[4], jaxpr.outvars[0]] == jaxpr.invars
    assert dtypes(jaxpr.outvars)[:5] == ("float32", dtype, other, "int32", "float32")
    alone = trace(autocast(lambda x: x.astype(dtype), compute_dtype=dtype), W)
    assert all_casts(alone) == [("float32", dtype)]
