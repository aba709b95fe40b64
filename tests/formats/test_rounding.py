"""Rounding to a number format, against ml_dtypes, which rounds by other means."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmp_autocast import formats

# The name of a format here, and of the dtype that has its numbers.
DTYPES = {
    "e8m7": "bfloat16",
    "e5m10": "float16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "float8_e4m3": "float8_e4m3",
    "e3m4": "float8_e3m4",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e4m3b11fnuz": "float8_e4m3b11fnuz",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
}
WITHOUT_NAN = ("e2m3", "e3m2", "e2m1")


def numbers_near(dtype):
    """Each finite number of a dtype, each midpoint of two, and both float32 neighbors of it."""
    codes = np.arange(2 ** min(8 * dtype.itemsize, 16)).astype(f"u{dtype.itemsize}")
    values = codes.view(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    # Of subnormal bfloat16 numbers, too, the midpoint is a float32 number.
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    largest = float(values.max())
    beyond = [largest + (largest - float(values[-2])) / 2, largest * 1.5, largest * 2, 1e30, np.inf]
    beyond = np.float32([x for x in beyond if x <= 3.4e38 or np.isinf(x)])
    points = np.concatenate([values, middles, beyond, -beyond, np.float32([1e-40, 0.0, -0.0])])
    with np.errstate(over="ignore"):
        up, down = (
            np.nextafter(points, np.float32(np.inf)),
            np.nextafter(points, np.float32(-np.inf)),
        )
    return np.concatenate([points, up, down]).astype(np.float32)


@pytest.mark.parametrize("name", DTYPES)
def test_each_number_midpoint_and_neighbor_rounds_as_in_ml_dtypes(name):
    dtype = np.dtype(getattr(ml_dtypes, DTYPES[name], None) or DTYPES[name])
    x = numbers_near(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    found = np.asarray(jax.jit(lambda x: formats.rounded(x, name))(x))
    known = np.ones(x.shape, bool)
    if name in WITHOUT_NAN:
        # ml_dtypes has to make some number of an infinity; here it saturates as others do.
        known = np.isfinite(x)
        assert np.abs(found[~known]).min() == formats.parse(name).largest
    differs = (found.view(np.uint32) != expected.view(np.uint32)) & known
    differs &= ~(np.isnan(found) & np.isnan(expected))
    assert not differs.any(), (x[differs][:5], found[differs][:5], expected[differs][:5])


@pytest.mark.parametrize("name", [*DTYPES, "mxfp8"])
def test_nan_stays_nan(name):
    assert np.isnan(formats.rounded(jnp.full(3, jnp.nan), name, saturate=True)).all()


@pytest.mark.parametrize("name", DTYPES)
def test_the_numbers_that_a_format_says_it_has(name):
    info, format = ml_dtypes.finfo(DTYPES[name]), formats.parse(name)
    assert (format.bits, format.mantissa) == (info.bits, info.nmant)
    found = format.largest, format.smallest, format.epsilon
    assert found == tuple(map(float, (info.max, info.smallest_subnormal, info.eps)))
    assert float(formats.rounded(jnp.float32(jnp.inf), name, saturate=True)) == format.largest


@pytest.mark.parametrize("name", ["e8m7", "e5m10", "e4m3", "e5m2", "e2m1", "e6m0"])
def test_stochastic_rounding_is_to_a_neighbor_and_right_in_the_mean(name):
    format = formats.parse(name)
    points = np.float32([1.03, 1.9, -0.7 * format.smallest, 5.3 * format.smallest, format.largest])
    x = np.repeat(points[None], 40_000, axis=0)
    found = np.asarray(formats.rounded(x, name, key=jax.random.key(0)), np.float64)
    for k, point in enumerate(points):
        values = np.unique(found[:, k])
        assert len(values) <= 2
        step = values[-1] - values[0]
        assert values[0] <= point <= values[-1]
        # Three standard deviations of the mean of 40,000 draws of 0 or 1, at most.
        assert abs(found[:, k].mean() - point) <= 3 * 0.5 / 200 * step
    again = formats.rounded(x, name, key=jax.random.key(1))
    assert (np.asarray(again)[:, :4] != found[:, :4]).any()
    assert (
        np.asarray(formats.rounded(found.astype(np.float32), name, key=jax.random.key(2))) == found
    ).all()


# --- blocks ---------------------------------------------------------------------------------------

BLOCKS = {
    "mxfp8": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxfp6": "e2m3",
    "mxfp6_e3m2": "e3m2",
    "mxfp4": "e2m1",
}


def by_the_specification(x, element):
    """Section 6.3 of the OCP Microscaling Formats specification, in float64, for whole blocks."""
    dtype, format = np.dtype(getattr(ml_dtypes, DTYPES[element])), formats.parse(element)
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    largest_exponent = np.floor(np.log2(np.where(largest > 0, largest, 1.0)))
    scale = 2.0 ** np.clip(largest_exponent - np.floor(np.log2(format.largest)), -127, 127)
    scaled = np.clip(blocks / scale, -format.largest, format.largest)
    values = scaled.astype(np.float32).astype(dtype).astype(np.float64)
    return (values * scale).reshape(x.shape).astype(np.float32)


def _blocks(shape):
    random = np.random.default_rng(0)
    exponents = random.integers(-20, 20, (*shape[:-1], shape[-1] // 32, 1))
    x = random.normal(size=(*shape[:-1], shape[-1] // 32, 32)) * 2.0**exponents
    x[0, 0] = 0
    return x.reshape(shape).astype(np.float32)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_the_specification(name):
    x = _blocks((64, 96))
    found = formats.rounded(x, name)
    np.testing.assert_array_equal(found, by_the_specification(x, BLOCKS[name]))
    along = formats.rounded(x.T, name, axis=0)
    np.testing.assert_array_equal(along.T, found)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_last_block_may_be_shorter(name):
    x = _blocks((4, 64))[:, :50]
    padded = np.pad(x, ((0, 0), (0, 14)))
    np.testing.assert_array_equal(
        formats.rounded(x, name), by_the_specification(padded, BLOCKS[name])[:, :50]
    )


def test_what_is_not_finite_makes_its_block_nan_and_no_other():
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 40] = np.inf, np.nan
    bad = np.isnan(formats.rounded(x, "mxfp4")).reshape(2, 2, 32)
    assert bad.all(axis=-1).tolist() == bad.any(axis=-1).tolist() == [[True, False], [False, True]]


def test_a_number_is_a_block():
    assert float(formats.rounded(jnp.float32(1.1), "mxfp4")) == 1.0


# --- names ----------------------------------------------------------------------------------------

WRONG = {
    "no bits": ("fp8", ValueError, r"format must name its bits, got 'fp8'. Write 'e4m3' or 'e5m2'"),
    "no mantissa": ("e4", ValueError, "must name its bits, got 'e4'. Write 'e5m7' for 5 exponent"),
    "a slip": ("mxfp5", ValueError, "got 'mxfp5'. Did you mean 'mxfp"),
    "too wide": (
        "e11m52",
        ValueError,
        "2 to 8 exponent bits and 0 to 23 mantissa bits, .*'e11m52'",
    ),
    "too narrow": ("e1m2", ValueError, "2 to 8 exponent bits"),
    "no IEEE form": ("e8m3fn", ValueError, "2 to 8 exponent bits"),
    "a sum": ("float8_e4m4", ValueError, "names 8 bits, .* are 9. Write 'float9_e4m4'"),
    "no room for a NaN": ("e5m0fn", ValueError, "has no mantissa bits: write 'e5m0'"),
    "a number": (8, TypeError, "format must be the name of a number format, got 8 of type int"),
}


@pytest.mark.parametrize(("name", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_format(name, error, message):
    with pytest.raises(error, match=message):
        formats.parse(name)


def test_one_format_has_several_names():
    assert formats.parse(jnp.float8_e5m2) == formats.parse("float8_e5m2")
    same = [formats.parse(name) for name in ("bf16", "bfloat16", "e8m7")]
    assert {dataclasses.replace(f, name="") for f in same} == {
        dataclasses.replace(same[0], name="")
    }
    assert formats.parse(same[0]) is same[0]
