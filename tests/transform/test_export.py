"""Programs with symbolic dimensions, and `jax.export` there and back.

`test_composition.py` calls an exported program inside autocast.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast
from tests.support.jaxprs import dot_dtypes, find

W = np.random.default_rng(0).standard_normal((8, 8), np.float32) / 3
MASKED = jnp.finfo(jnp.float32).min


def causal_attention(x):
    steps = jnp.arange(x.shape[0])
    scores = jnp.where(steps[:, None] >= steps, x @ W @ x.T, MASKED)
    return jax.nn.softmax(scores) @ x


def rotary(x):
    angles = jnp.arange(x.shape[0], dtype=jnp.float32)[:, None] @ W[:1]
    return jnp.sin(angles) * (x @ W)


def recurrent(x):
    return lax.scan(lambda h, row: (jnp.tanh(h @ W + row), h), jnp.zeros(8), x)


def gradient(x):
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(W)


def normalized(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) @ W


# Each with its arguments' shapes; "b" and "c" are symbolic.
PROGRAMS = {
    "attention": (lambda x: jax.nn.softmax(x @ W @ x.T) @ x, ["b, 8"]),
    "causal_attention": (causal_attention, ["b, 8"]),
    "rotary": (rotary, ["b, 8"]),
    "recurrent": (recurrent, ["b, 8"]),
    "gradient": (gradient, ["b, 8"]),
    "normalized": (normalized, ["b, 8"]),
    "residual": (lambda x, y: (jnp.tanh(x @ W) + y) @ W, ["b, 8", "b, 8"]),
    "rows": (lambda x, y: ((x @ W).T + y).T @ W, ["b, 8", "b"]),
    "columns": (lambda x, y, r: (x @ W @ y + r) @ y.T, ["b, 8", "8, c", "b, 1"]),
    "outer_sum": (lambda x, y: jnp.tanh(x @ W[:, :1] + y), ["b, 8", "1, c"]),
    "sliced": (lambda x: lax.slice_in_dim(jnp.exp(x @ W @ x.T), 0, 1) @ x, ["b, 8"]),
    "two_sizes": (lambda x, y: jnp.concatenate([x @ W, y]) @ W, ["b, 8", "c, 8"]),
    "expressions": (lambda x, y: jnp.concatenate([x, x]) @ W + y, ["b, 8", "2*b, 8"]),
    "its_own_size": (lambda x: (x @ W / x.shape[0]) @ W, ["b, 8"]),
    "branches": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ W, lambda x: 2 * x, x), ["b, 8"]),
}
SIZES = {"b": 6, "c": 7, "2*b": 12, "8": 8, "1": 1}


pytestmark = pytest.mark.usefixtures("jit_caches")


def symbolic(shapes):
    scope = jax.export.SymbolicScope()
    return [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(s, scope=scope), jnp.float32) for s in shapes
    ]


def concrete(shapes):
    return [
        jax.ShapeDtypeStruct([SIZES[d.strip()] for d in s.split(",")], jnp.float32) for s in shapes
    ]


@pytest.mark.parametrize("level", ["o1", "compute"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_symbolic_programs_are_cast_as_concrete_ones(name, level):
    fn, shapes = PROGRAMS[name]
    cast = jax.jit(autocast(fn, policy=BF16.with_level(level)))
    args = symbolic(shapes)
    found = cast.trace(*args)
    assert found.out_info == jax.jit(fn).trace(*args).out_info
    expected = cast.trace(*concrete(shapes)).jaxpr
    if name == "rotary":  # nothing bounds its positions
        assert dot_dtypes(found.jaxpr)[0] == ("float32",) * 3
        assert dot_dtypes(found.jaxpr)[1:] == dot_dtypes(expected)[1:]
    else:
        assert dot_dtypes(found.jaxpr) == dot_dtypes(expected)
    primitives = ["exp", "tanh", "reduce_max", "reduce_sum"]
    # 1 / b is computed, not a literal: the cotangents are float32, and so is `1 - tanh(x) ** 2`.
    if name == "gradient":
        primitives.remove("tanh")
    for primitive in primitives:
        dtypes = [
            [eqn.invars[0].aval.dtype for eqn in find(jaxpr, primitive)]
            for jaxpr in (found.jaxpr, expected)
        ]
        assert dtypes[0] == dtypes[1], primitive


def test_a_symbolic_program_there_and_back():
    loss = lambda w, x: jnp.mean(causal_attention(x @ w) ** 2)
    fn = jax.jit(autocast(loss, jnp.bfloat16, params=0))
    exported = jax.export.export(fn)(jax.ShapeDtypeStruct(W.shape, W.dtype), *symbolic(["b, 8"]))
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert again.out_avals == exported.out_avals
    assert "xbf16>" in again.mlir_module()
    for size in (3, 8):
        x = np.random.default_rng(size).standard_normal((size, 8), np.float32)
        found, expected = (
            jax.jit(jax.value_and_grad(functools.partial(lambda f, w, x: f(w, x), f)))(W, x)
            for f in (again.call, loss)
        )
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype == jnp.float32
            np.testing.assert_allclose(a, b, atol=3e-2 * np.max(np.abs(b)))
