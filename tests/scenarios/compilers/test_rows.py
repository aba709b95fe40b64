"""The scenarios of compilers' mixed-precision passes, a row each, with their numbers.

TVM's Relay (1-18) and Relax (19-29), TensorFlow's auto_mixed_precision (30-44), and ModelOpt's
AutoCast with onnxconverter-common (45-59). What is not here is tested elsewhere: softmax and norms
(7, 57) in `test_torch`, clips and lists in ``plan/test_guards.py`` and `conformance` (13, 14, 41),
calls (9, 59) in ``plan/test_calls.py`` and ``loops/test_structural.py``, opaque ones (26) in
``rewrite/test_structural_opaque.py``, the program's own casts of numbers (35) in
``plan/test_number_factors.py``, carries, buffers and sums in them (36 to 38, 44) in ``loops``,
unary operations (42) in `conformance`, one cast per parameter (52) in
``derivatives/test_source_views.py``, arrays without elements (53) by the fuzzer, derivatives (62 to
82) and their sums (41, 43) in `test_autodiff` and `test_models`; parameters that are low already
(28) are a case of 31.
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
    X,
    affine,
    all_casts,
    cast,
    conv,
    of,
    relu,
    round_trips,
    silu,
    softmax,
)
from tests.support.jaxprs import assert_dots_run_in, dtypes, find, trace

W = of(6, 6, seed=2)
PARAMS = {"w": W, "bias": of(6)}
# Where the planner decides more than the dtypes of products.
WIDE = [pair for pair in COMBINATIONS if pair[1] != "tensor_cores"]


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


def product_and_softmax(make):
    return lambda w, x: (v := make(x), v @ w + v.T @ w, softmax(v), jnp.log(v))[1:]


def users_cast(w, x):
    full = (x @ w).astype(jnp.bfloat16).astype(jnp.float32)
    return full * (x @ w), (w @ x) - full


BETWEEN = {
    "relu": relu,
    "tanh": jnp.tanh,
}
ADD_AND_SILU = {"add": "low", "logistic": "low", "mul": "low"}
# No exp: in float16 a product of one without a bound is float32.
MADE = {"input": lambda x: x, "computed": jnp.log1p}

ROWS = {
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
    "10 branches of a where": Row(
        lambda data, w: jnp.where(data > 0.5, data @ w, jnp.tanh(data @ w)),
        (W, W),
        reads={"select_n": "bool low low", "gt": "full full"},
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
    **{
        f"23 concatenated before the cast, {name}": Row(
            lambda w, x, y, f=f: jnp.concatenate([f(x), f(y)]) @ w,
            (W, W, 2 * W),
            {"concatenate": "full"},
            down=2,  # the concatenation and the weight
            options={"params": 0},
        )
        for name, f in MADE.items()
    },
    **{
        f"24, 51 for a product and a softmax, {name}": Row(
            product_and_softmax(f),
            (W, np.abs(W)),
            reads={"exp": "full", "log": "full", "reduce_max": "full"},
            down=2,  # the value and the weight
            options={"params": 0},
        )
        for name, f in MADE.items()
    },
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
    "convolution": lambda w, x: jnp.abs(conv(x[None, None], w[None, None, :3, :3])),
    "branches": lambda w, x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x @ w),
}


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
@pytest.mark.parametrize("fn", LOW_PROGRAMS.values(), ids=LOW_PROGRAMS)
def test_a_low_program_is_left_alone(fn, dtype, level):
    """31: at each level; what the program itself declares in 16 bits is not cast up."""
    w, x = jnp.asarray(W, dtype), jnp.asarray(of(6, 6), dtype)
    assert str(trace(cast(fn, dtype, level), w, x)) == str(trace(fn, w, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output_dtype", ["same", "computed"])
def test_an_input_that_is_an_output(output_dtype, dtype):
    """55: as it is, or in the program's own cast, beside a product that reads it low."""
    other = "float16" if dtype == "bfloat16" else "bfloat16"
    fn = lambda w, x: (x, x.astype(dtype), x.astype(other), x.astype(jnp.int32), w, x @ w)
    jaxpr = trace(autocast(fn, dtype, output_dtype=output_dtype), W, W).jaxpr
    assert [jaxpr.outvars[4], jaxpr.outvars[0]] == jaxpr.invars
    assert dtypes(jaxpr.outvars)[:5] == ("float32", dtype, other, "int32", "float32")
    alone = trace(autocast(lambda x: x.astype(dtype), dtype), W)
    assert all_casts(alone) == [("float32", dtype)]
