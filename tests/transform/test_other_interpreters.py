"""Programs under `jax.experimental.jet` and `sparsify`, which have tables of JAX's primitives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet, sparse

from jmp_autocast import BF16, autocast
from tests.support.numerics import draw, relative_error

W, V = draw(0, 8, 8) / 3, draw(1, 8, 8) / 3
KERNEL = draw(2, 3, 1, 1) / 3
NUMBERS = "NWC", "WIO", "NWC"


def block(x):
    return x + jnp.tanh(x @ W) @ V


def attention(x):
    scores = jax.nn.softmax(jnp.einsum("id,jd->ij", x @ W, x @ V))
    return jnp.einsum("ij,jd->id", scores, x)


SMOOTH = {
    "block": block,
    "jit": lambda x: jax.jit(block)(x) @ W,
    "bilinear": lambda x: x @ (x @ W),
    "cube": lambda x: (x @ W) ** 3,
    "quotient": lambda x: (x @ W) / (2 + jnp.cos(x @ V)),
    "batched": lambda x: jnp.einsum("bij,bjk->bik", x.reshape(2, 4, 8), V.reshape(2, 8, 4)),
    "convolution": lambda x: lax.conv_general_dilated(
        x[..., None], KERNEL, (1,), "SAME", dimension_numbers=NUMBERS
    ),
    "attention": attention,
    "vmap": lambda x: jax.vmap(lambda row: jnp.tanh(row @ W))(x),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_of_order_3_by_jet(name):
    x, direction = draw(3, 8, 8) / 2, draw(4, 8, 8) / 2
    series = ((direction, jnp.zeros_like(x), jnp.zeros_like(x)),)
    half = autocast(SMOOTH[name], policy=BF16)
    value, terms = jet.jet(half, (x,), series)
    want, expected = jet.jet(SMOOTH[name], (x,), series)
    assert relative_error(value, want) < 0.02
    scale = max(float(jnp.linalg.norm(term)) for term in expected)
    for term, exact in zip(terms, expected, strict=True):
        assert term.dtype == exact.dtype == want.dtype
        np.testing.assert_allclose(jnp.linalg.norm(term - exact) / scale, 0, atol=0.02)


MATRIX = draw(5, 8, 8) * (np.random.default_rng(6).random((8, 8)) < 0.3)

SPARSE = {
    "matrix times matrix": lambda m, x: m @ x,
    "dense on the left": lambda m, x: x @ m,
    "maximum of it": lambda m, x: jnp.maximum(m @ x, 0) @ W,
    "graph convolution": lambda m, x: jnp.tanh(m @ (x @ W)) @ V,
    "two layers": lambda m, x: m @ jnp.tanh(m @ x @ W) @ V,
    "jit": lambda m, x: jax.jit(lambda m, x: jnp.tanh(m @ x))(m, x),
    "elementwise": lambda m, x: jnp.sin(m) @ x,
    "residual": lambda m, x: x + m @ (x @ W),
}


FORMATS = [*((name, sparse.BCOO) for name in SPARSE), ("graph convolution", sparse.BCSR)]


# The environment of `sparsify` holds tracers that the check for leaks finds, without us as well.
@pytest.mark.filterwarnings("ignore:bcsr_dot_general cpu lowering not available")
@pytest.mark.parametrize(("name", "kind"), FORMATS)
def test_sparse_matrices_by_sparsify(name, kind, as_users_run_it):
    x, function = draw(7, 8, 8), SPARSE[name]
    matrix = kind.fromdense(jnp.asarray(MATRIX))
    got = sparse.sparsify(autocast(function, policy=BF16))(matrix, x)
    dense = function(MATRIX, x)
    assert got.dtype == dense.dtype
    assert relative_error(got, dense) < 0.02
