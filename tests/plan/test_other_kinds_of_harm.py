"""Values that 16 bits get wrong by kind, where no elementwise operation alone decides.

A row of a table is a program, its arguments, how far from float64 it may be and what is measured.
Each runs inline, in a `jit`, in a `checkpoint` and in a `scan`, in both 16-bit dtypes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, autocast

from .test_kinds_of_harm import differing, normal, relative

FORMS = {
    "inline": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda fn: lambda *args: lax.scan(lambda c, _: (c, fn(*args)), 0, None, 2)[1],
}

# --- chains of sums through writes and copies --------------------------------------------------

BRANCHES = normal(12, 16, 16) / 4e3
STREAM = np.sign(normal(8, 16))


def branch(h, w):
    return jnp.tanh(h @ w)


def added_by(step):
    """The sum of branches of 1e-3 that a step adds to a stream."""
    return lambda ws, x: functools.reduce(step, ws, x @ jnp.eye(16, dtype=x.dtype)) - x


CHAINS = {
    "set": lambda h, w: h.at[1:].set(h[1:] + branch(h[1:], w)),
    "set, of zeros": lambda h, w: (
        jnp.zeros_like(h).at[jnp.arange(8)[::-1]].set((h + branch(h, w))[::-1])
    ),
    "put along an axis": lambda h, w: jnp.put_along_axis(
        h, jnp.tile(jnp.arange(16), (8, 1)), h + branch(h, w), 1, inplace=False
    ),
    "one of two copies": lambda h, w: jnp.broadcast_to((h + branch(h, w))[None], (2, 8, 16))[0],
    "one of repeated rows": lambda h, w: jnp.repeat(h + branch(h, w), 2, 0)[::2],
    "a larger one": lambda h, w: jnp.full_like(h, -9).at[jnp.arange(8)].max(h + branch(h, w)),
}
CHAINED = {
    name: (added_by(step), (BRANCHES, STREAM), 0.05, relative) for name, step in CHAINS.items()
}

KINDS = {"chains": CHAINED}
ROWS = [
    pytest.param(*row, id=f"{kind}: {name}")
    for kind, rows in KINDS.items()
    for name, row in rows.items()
]


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("program", "args", "bound", "measured"), ROWS)
def test_it_is_as_near_to_float64_as_its_operands_are(program, args, bound, measured, policy):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), args)
        exact = jax.tree.map(np.asarray, program(*wide))
    for form, of in FORMS.items():
        got = jax.jit(autocast(of(program), policy))(*args)
        if form == "scan":
            got = jax.tree.map(lambda x: x[0], got)
        assert measured(got, exact) <= bound, form
