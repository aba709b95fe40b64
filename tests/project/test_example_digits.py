"""The first example of the README: it trains in 16 bits, and counts what is low."""

import jax
import pytest

from tests.support.examples import is_picture, load


@pytest.fixture(scope="module")
def digits():
    return load("train_digits")


@pytest.mark.usefixtures("as_users_run_it")
def test_digits_train_in_16_bits(digits, capsys, tmp_path):
    full, *low = digits.main(["--epochs", "3", "--output", str(tmp_path)])
    assert is_picture(tmp_path / "digits.png")
    assert (full.dtype, full.low_flops, full.all_low, full.casts) == ("float32", 0, False, 0)
    assert full.accuracy > 0.9
    assert [r.dtype for r in low] == ["float16", "bfloat16"]
    for result in low:
        assert result.all_low
        assert result.low_flops == 1
        assert abs(result.accuracy - full.accuracy) <= 0.015
        assert result.loss == pytest.approx(full.loss, rel=0.05)
        assert result.casts < 40  # the network has 12 parameters
    table = capsys.readouterr().out
    assert all(name in table for name in ("float32", "float16", "bfloat16", "accuracy"))


def test_digits_counts_what_is_low(digits):
    def fn(w, x):
        low = x.astype("bfloat16") @ w.astype("bfloat16")
        return jax.jit(jax.numpy.matmul)(x, w), low

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 4), (2, 3))]
    assert digits.count(fn, *shapes) == (0.5, False, 2)
