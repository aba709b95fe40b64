"""What takes long says where it is in a terminal, and nothing in a log."""

import io
import sys

import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, compare, explain


class Terminal(io.StringIO):
    def isatty(self):
        return True


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (lambda *args: explain(loss, *args, policy=BF16), "reading the plan"),
        (lambda *args: compare(loss, *args, policy=BF16), "running both programs"),
        (lambda *args: compare(loss, *args, policy=BF16, argnums=0), "backward passes"),
    ],
    ids=["explain", "compare", "compare_gradients"],
)
def test_progress_is_for_terminals(tool, says, monkeypatch):
    args = jnp.ones((8, 8)), jnp.ones((4, 8))
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        tool(*args)
        assert (says in stream.getvalue()) == stream.isatty()
