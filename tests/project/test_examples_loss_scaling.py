"""The short examples of loss scaling run, learn, and skip the batch that is bad."""

import jax
import numpy as np
import pytest

from jmp_autocast import loss_scale, skipped_steps
from tests.support.examples import is_picture, load

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def assert_finite(tree):
    for path, leaf in jax.tree.leaves_with_path(tree):
        assert np.all(np.isfinite(leaf)), jax.tree_util.keystr(path)


def test_plain(capsys, tmp_path):
    loss, scale = load("loss_scaling_plain").main(["--output", str(tmp_path)])
    assert loss < 0.05
    assert (scale.skipped_steps, scale.scale) == (1, 2.0**18)
    assert is_picture(tmp_path / "scale.png")
    assert "skipped" in capsys.readouterr().out


def test_linen(capsys, tmp_path):
    accuracy, state = load("loss_scaling_linen").main(["--output", str(tmp_path)])
    assert accuracy > 0.9
    assert (skipped_steps(state), loss_scale(state)) == (1, 2.0**18)
    assert_finite((state.params, state.batch_stats))
    assert "1 of 200 steps skipped" in capsys.readouterr().out


def test_nnx(capsys, tmp_path):
    accuracy, optimizer = load("loss_scaling_nnx").main(["--output", str(tmp_path)])
    assert accuracy > 0.9
    assert (skipped_steps(optimizer), loss_scale(optimizer)) == (1, 2.0**18)
    assert "1 of 200 steps skipped" in capsys.readouterr().out
