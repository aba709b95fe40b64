"""Tracebacks of a user's own error show the user's frames."""

import pathlib
import traceback

import jax
import jax.numpy as jnp
import pytest

import jmp_autocast
from jmp_autocast import BF16, autocast
from jmp_autocast.interpreters import compat

PACKAGE = str(pathlib.Path(jmp_autocast.__file__).parent)


def loss(w, x):
    return jnp.sum(x @ w)


@pytest.fixture
def mode():
    before = jax.config.jax_traceback_filtering
    yield lambda value: jax.config.update("jax_traceback_filtering", value)
    jax.config.update("jax_traceback_filtering", before)


def _frames(wrap):
    fn = wrap(autocast(loss, policy=BF16))
    with pytest.raises(TypeError) as caught:
        fn(jnp.ones((8,)), jnp.ones((9,)))
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files.count(__file__) >= 2  # the call, and the line of the loss
    return [file for file in files if file.startswith(PACKAGE)]


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, jax.grad, lambda fn: jax.jit(jax.value_and_grad(fn))],
    ids=["jit", "grad", "both"],
)
def test_no_frame_of_ours(wrap, mode):
    mode("auto")
    assert not _frames(wrap)
    mode("off")
    assert _frames(wrap)


def test_jax_without_the_name(monkeypatch):
    monkeypatch.setattr(compat, "private", lambda name: None)
    compat.hide_package()
