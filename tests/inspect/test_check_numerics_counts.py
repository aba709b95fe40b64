"""The counts of `check_numerics` against NumPy, and its report."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jmp_autocast import check_numerics
from jmp_autocast.inspect import NumericsReport
from jmp_autocast.inspect.measure.numerics_probe import (
    INFINITY,
    NEVER,
    Counts,
    NumericsProbe,
    Reading,
)

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -3.0, 65504.0, 65519.9, 65520.0, -65520.0, 1e30]
SPECIAL += [2.0**-24, 2.0**-25, -(2.0**-25), 2.0**-25 * (1 + 2**-7), 2.0**-26, 6e-8, 1e-40, 1e-45]
WIDE = [1e300, -1e300, 1e-300, 5e-324, 3.5e38, 1e-38]
DTYPES = ["float32", "float16", "bfloat16", "float64", "complex64", "complex128"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
DTYPES += ["float8_e4m3b11fnuz", "float8_e3m4", "float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn"]


def array_of(dtype):
    """Special values, and 200 values over the range of the dtype."""
    random = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        sizes = 2.0 ** random.uniform(-60, 60, 200) * random.choice([-1, 1], 200)
        values = np.concatenate([SPECIAL, WIDE, sizes])
        if np.dtype(dtype).kind == "c":
            values = values + 1j * values[::-1]
        return values.astype(dtype)


def row_of(fn, *args, mode="collect"):
    (row,) = check_numerics(fn, mode=mode)(*args)[1].rows
    return row


def counted_by_numpy(x):
    """In float64, which has the values of the other dtypes as normal numbers."""
    smallest_normal = float(ml_dtypes.finfo(x.dtype).smallest_normal)
    parts = np.concatenate([x.real, x.imag]) if x.dtype.kind == "c" else x
    magnitude = np.abs(parts.astype(np.float64))
    finite = np.isfinite(magnitude)
    some = finite & (magnitude > 0)
    with np.errstate(over="ignore"):
        half = magnitude.astype(np.float16)
    single = np.clip(magnitude[some], 2.0**-149 if parts.itemsize < 8 else 2.0**-126, 2.0**128)
    largest = float(np.finfo(np.float32).max)
    return {
        "nan": np.isnan(magnitude).sum(),
        "inf": np.isinf(magnitude).sum(),
        "zero": (magnitude == 0).sum(),
        "subnormal": (some & (magnitude < smallest_normal)).sum(),
        "large": (finite & np.isinf(half)).sum(),
        "small": (some & (half == 0)).sum(),
        "largest": min(np.float32(min(single.max(), largest)), largest),
        "smallest": np.float32(single.min()),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_are_numpys(dtype):
    dtype = jnp.dtype(dtype)
    x = array_of(dtype)
    with jax.enable_x64(dtype.itemsize >= 8):
        # A copy of bits, in which the device flushes nothing.
        row = row_of(lambda x: jnp.concatenate([x, x[:1]]), x)
    expected = counted_by_numpy(np.concatenate([x, x[:1]]))
    assert {key: getattr(row, key) for key in expected} == expected
    assert (row.dtypes, row.shapes) == ((dtype.name,), ((len(x) + 1,),))
    assert (row.runs, row.values) == (1, len(x) + 1)


def test_no_finite_value_and_none_but_zero():
    row = row_of(lambda x: jnp.concatenate([x, x]), np.array([np.inf, np.nan], np.float32))
    assert (row.largest, row.smallest, row.zero) == (0.0, math.inf, 0)
    row = row_of(lambda x: jnp.concatenate([x, x]), np.array([0.0, -0.0], np.float32))
    assert (row.largest, row.smallest, row.zero) == (0.0, math.inf, 4)


def test_several_results_are_one_row():
    def fn(x):
        return lax.reduce((x, -x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,))

    row = check_numerics(fn, mode="collect")(np.array([[3e38], [3e38]], np.float32))[1].rows[-1]
    assert (row.primitive, row.shapes, row.dtypes) == ("reduce", ((1,), (1,)), ("float32",) * 2)
    assert (row.inf, row.zero, row.values) == (1, 1, 2)


def test_counts_add_up_over_the_iterations_of_a_loop():
    def fn(x):
        return lax.scan(lambda c, y: (c, y * 0.5), 0, x)[1]

    x = np.array([[0, 4], [1e30, 2], [np.inf, 8], [0, 2.0**-24]], np.float32)
    row = row_of(fn, x)
    assert (row.runs, row.values, row.zero, row.inf, row.large, row.small) == (4, 8, 2, 1, 1, 1)
    assert (row.largest, row.smallest) == (np.float32(5e29), 2.0**-25)


def test_overflow_names_the_first_value_beyond_float16():
    def step(h, _):
        return h * 10.0, jnp.sin(h)

    fn = check_numerics(lambda x: lax.scan(step, x, None, length=7), mode="overflow")
    _, report = fn(np.ones(2, np.float32))
    assert (report.first.primitive, report.first.first_run, report.first.large) == ("mul", 4, 6)
    assert report.summary == "<lambda>: a value beyond float16's range, made by 1 of 2 equations"
    assert "mul makes 6 values beyond float16 among 14 values (float32[2])" in str(report)
    _, report = fn(np.zeros(2, np.float32))
    assert report.summary == "<lambda>: 2 equations, nothing beyond float16's range"


FIELDS = Counts._fields
PROBE = NumericsProbe()


def reading(runs, first_run=NEVER, first=NEVER, bad_runs=0, **counts):
    one = lambda x: np.array([x], np.uint32)
    values = dict.fromkeys(FIELDS, 0) | {"smallest": INFINITY} | counts
    each = Counts(**{name: one(value) for name, value in values.items()})
    return Reading(each, one(runs), one(bad_runs), one(first_run), one(first))


def merged(*readings):
    total = readings[0]
    for each in readings[1:]:
        total = jax.jit(PROBE.merge)(total, each)
    return total


@pytest.mark.parametrize("name", ["nan", "inf", "zero", "subnormal", "large", "small"])
def test_counts_stop_at_the_greatest_number(name):
    found = merged(
        reading(1, **{name: NEVER - 2}), reading(1, **{name: 5}), reading(1, **{name: 7})
    )
    assert getattr(found.counts, name)[0] == NEVER
    found = merged(reading(1, **{name: NEVER - 7}), reading(1, **{name: 5}))
    assert getattr(found.counts, name)[0] == NEVER - 2


X = np.array([1.0, 0.0, 4.0], np.float32)


def long_names(x):
    for k in range(12):
        with jax.named_scope(f"a_scope_whose_name_is_much_too_long_for_any_terminal_{k}" * 3):
            x = jnp.log(x) * 0.0 + jnp.sqrt(x - 1e9) * 0.0
            x = jnp.where(jnp.isfinite(x), x, 0.0)
    return x


long_names.__name__ = "a_function_with_a_name_that_nobody_would_want_to_type" * 3


def test_a_report_is_a_pytree():
    fn = check_numerics(lambda x: jnp.log(x) * 2.0, mode="collect")
    value, report = jax.jit(fn)(X)
    assert isinstance(report, NumericsReport)
    assert report.rows == fn(X)[1].rows
    again = jax.tree.unflatten(jax.tree.structure(report), jax.tree.leaves(report))
    assert again.rows == report.rows
    assert jax.tree.structure(report) == jax.tree.structure(fn(X)[1])
    np.testing.assert_array_equal(value, fn(X)[0])


@pytest.mark.parametrize("outer", [jax.vmap, lambda f: jax.jit(jax.vmap(f))])
def test_rows_sum_over_a_mapped_axis(outer):
    def fn(x):
        y = jnp.log(x)
        return lax.while_loop(lambda y: y[1] < 3.0, lambda y: y * 2.0, y)

    x = np.array([[1.0, 2.0], [0.0, 4.0], [8.0, 2.0]], np.float32)
    _, report = outer(check_numerics(fn, mode="collect"))(x)
    log = report.rows[0]
    assert (log.runs, log.values, log.zero, log.inf, log.bad_runs) == (3, 6, 1, 1, 1)
    assert (log.largest, log.smallest) == (np.log(np.float32(8)), np.log(np.float32(2)))
    mul = next(row for row in report.rows if row.primitive == "mul")
    # log 2, twice: three times doubled; log 4 twice, beside an infinity.
    assert (mul.runs, mul.inf, mul.bad_runs) == (3 + 2 + 3, 2, 0)
