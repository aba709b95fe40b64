"""The first example of the README: it trains in 16 bits, as far as in float32."""

import jax
import pytest

from tests.support.examples import is_picture, load


@pytest.mark.usefixtures("as_users_run_it")
def test_digits_train_in_16_bits(capsys, tmp_path):
    full, *low = load("train_digits").main(["--steps", "66", "--output", str(tmp_path)])
    assert is_picture(tmp_path / "losses.png")
    assert (full.dtype, full.low_flops, full.skipped_steps) == ("float32", 0, 0)
    assert full.score > 0.9
    assert [run.dtype for run in low] == ["bfloat16", "float16"]
    for run in low:
        assert run.low_flops == 1
        assert run.skipped_steps == 0
        assert abs(run.score - full.score) <= 0.015
        assert run.loss == pytest.approx(full.loss, rel=0.05)
    table = capsys.readouterr().out
    assert all(name in table for name in ("float32", "float16", "bfloat16", "accuracy"))


def test_the_share_in_16_bits():
    def fn(w, x):
        low = x.astype("bfloat16") @ w.astype("bfloat16")
        return jax.jit(jax.numpy.matmul)(x, w), low

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 4), (2, 3))]
    assert load("runs").low_share(fn, *shapes) == 0.5
