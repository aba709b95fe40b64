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

from jmp_autocast import BF16, FP16, autocast, explain

from .test_kinds_of_harm import conv, differing, normal, relative

pytestmark = pytest.mark.usefixtures("jit_caches")

FORMS = (
    lambda fn: fn,
    jax.jit,
    jax.checkpoint,
    lambda fn: (
        lambda *args: jax.tree.map(
            lambda y: y[0], lax.scan(lambda c, _: (c, fn(*args)), 0, None, 2)[1]
        )
    ),
)


# --- chains of sums through writes and copies --------------------------------------------------

BRANCHES = normal(8, 16, 16) / 4e3
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

# --- products that become whole numbers --------------------------------------------------------

BITS = np.sign(normal(64, 12))
IDS = np.arange(64, dtype=np.int32) % 8
CODES = np.float32([[5], [1001], [333], [777], [259], [263], [1025], [4001]])
MASK = (normal(4, 600) > -1).astype(np.float32)


def one_hot(ids):
    return jax.nn.one_hot(ids, 8, dtype=jnp.float32)


INDICES = {
    "codes": (lambda b: ((b > 0).astype(b.dtype) @ 2.0 ** np.arange(12)).astype(int), BITS),
    "cells": (lambda b: jnp.round((jnp.floor(b) + 1) @ np.float32(3 ** np.arange(12) % 997)), BITS),
    "rows of a table": (lambda i: (one_hot(i) @ CODES).astype(int), IDS),
    "rows of a table that is given": (lambda i, t: (one_hot(i) @ t).astype(int), IDS, CODES),
    "positions": (lambda m: (m > 0).astype(m.dtype) @ jnp.triu(jnp.ones((600, 600))), MASK),
    "lengths compared": (lambda m: (m > 0).astype(m.dtype) @ jnp.ones((600, 1)) > 507, MASK),
    "counts in a window": (lambda m: jnp.convolve(m[0] > 0, jnp.ones(500), "valid"), MASK),
    "of a rounded product": (
        lambda m: (((m > 0) @ np.ones((600, 2), np.float32)) @ np.ones((2, 5))).astype(int),
        MASK,
    ),
}
COUNTED = {name: (fn, args, 0, differing) for name, (fn, *args) in INDICES.items()}

# --- gradients that add up ----------------------------------------------------------------------

WEIGHTS, EXAMPLES = normal(2, 16, 16) / 4, normal(4, 12, 16)


def loss(fn):
    return lambda w, x: jnp.sum(jnp.sin(fn(x @ w[0], w[1], x)))


SUMS = {
    "tile of a token": lambda h, w, x: (jnp.tile(h[:, :1], (1, 12, 1)) @ w) * x,
    "maximum, for a product": lambda h, w, x: jnp.square(h).max(1) @ w,
    "minimum, for a product": lambda h, w, x: jnp.minimum(h, 0).min(1) @ w,
    "maximum of a tanh": lambda h, w, x: jnp.tanh(h).max(1) @ w,
    # 600 rows are equal: bfloat16 counts 256 of them.
    "maximum by segments": lambda h, w, x: (
        jax.ops.segment_max(h[jnp.arange(2400) % 4, 0], jnp.arange(2400) % 4, 4) @ w
    ),
    "minimum by a scatter": lambda h, w, x: h[0, :2].at[jnp.zeros(600, int)].min(h[1, 0]) @ w,
}
ADDED = {name: (loss(fn), (WEIGHTS, EXAMPLES), 0.1, relative) for name, fn in SUMS.items()}

# --- variances ----------------------------------------------------------------------------------

WIDTH = 32
BUMP = np.exp(-np.square(np.arange(-3, 4) / 1.5) / 2)
BUMP = (BUMP / BUMP.sum()).astype(np.float32)
BANDS = np.stack([np.pad(BUMP, (i, WIDTH - 7 - i)) for i in range(WIDTH - 6)])
PICTURE = 0.6 + 0.25 * np.sin(np.linspace(0, 9, WIDTH))[:, None] * np.ones(WIDTH)
PICTURE = (PICTURE + 0.02 * normal(WIDTH, WIDTH)).astype(np.float32)[None, :, :, None]
NEAR = (normal(WIDTH, WIDTH) > 0).astype(np.float32)


def computed_window():
    bump = jnp.exp(-jnp.square(jnp.arange(-3.0, 4.0) / 1.5) / 2)
    return bump / bump.sum()


MEANS = {
    "windows of rows and columns": lambda x: conv(
        conv(x, BUMP[:, None, None, None]), BUMP[None, :, None, None]
    ),
    "two band matrices": lambda x: BANDS @ x[0, :, :, 0] @ BANDS.T,
    "a sum by a number": lambda x: conv(x, np.ones((5, 5, 1, 1))) / 25,
    "a sum by a count": lambda x: (
        conv(x, np.ones((5, 5, 1, 1))) / conv(jnp.ones_like(x), np.ones((5, 5, 1, 1)))
    ),
    "windows that are computed": lambda x: conv(
        conv(x, computed_window()[:, None, None, None]), computed_window()[None, :, None, None]
    ),
}


def variance_by(mean):
    return lambda x: mean(x * x) - jnp.square(mean(x))


def of_neighbors(x, a):
    h, degree = 10 * x[0, :, :, 0], a.sum(1, keepdims=True)
    return a @ jnp.square(h) / degree - (a @ h / degree) ** 2


EXPANDED = {name: (variance_by(mean), (PICTURE,), 1e-3, relative) for name, mean in MEANS.items()}
EXPANDED["of neighbors"] = of_neighbors, (PICTURE, NEAR), 1e-3, relative


def of_clusters(x, a):
    h, shares = 1 + x[0, :, :8, 0], a[:, :4] / a[:, :4].sum(0)
    means = shares.T @ h
    squares = jnp.einsum("nk,nd,ne->kde", shares, h, h)
    return squares - means[:, :, None] * means[:, None]


def by_inverse_degrees(x, a):
    h, each = 10 * x[0, :, :, 0], 1 / a.sum(1, keepdims=True)
    return each * (a @ jnp.square(h)) - (each * (a @ h)) ** 2


def of_sums(x):
    h = 1 + x[0, :, :8, 0]
    total = h.sum(0, keepdims=True)
    return h.T @ h - total.T @ total / WIDTH


def of_clusters_by_products(x, a):
    h, shares = 1 + x[0, :, :8, 0], a[:, :4] / a[:, :4].sum(0)
    means = shares.T @ h
    return jnp.einsum("nk,nd,ne->kde", shares, h, h) - jnp.einsum("kd,ke->kde", means, means)


def like_a_template(x):
    part = x[0, 4:11, 4:11, 0]
    found = conv(x, part[:, :, None, None])
    return found - conv(x, np.ones((7, 7, 1, 1))) * part.mean()


EXPANDED["of clusters"] = of_clusters, (PICTURE, NEAR), 1e-3, relative
EXPANDED["by inverse degrees"] = by_inverse_degrees, (PICTURE, NEAR), 1e-3, relative
EXPANDED["of sums"] = of_sums, (PICTURE,), 1e-3, relative
EXPANDED["of clusters by products"] = of_clusters_by_products, (PICTURE, NEAR), 1e-3, relative
EXPANDED["like a template"] = like_a_template, (PICTURE,), 1e-3, relative

# --- less its average, less its update by rank one ----------------------------------------------

SMOOTH = 0.5 + 0.3 * np.sin(np.linspace(0, 3, WIDTH))[:, None] * np.cos(np.linspace(0, 2, WIDTH))
SMOOTH = SMOOTH.astype(np.float32)[None, :, :, None]
BLUR = np.outer(BUMP, BUMP)[:, :, None, None]
NARROW = BLUR**2 / (BLUR**2).sum()
AVERAGES = np.full((WIDTH, WIDTH), 1 / WIDTH, np.float32)
INNER = np.s_[:, 3:-3, 3:-3]


def resized(x, size):
    return jax.image.resize(x, (1, size, size, 1), "linear")


def edges(x):
    y = conv(x, BLUR)
    return jnp.diff(y, axis=1), jnp.diff(y, axis=2)


GRID = (np.abs(np.subtract.outer(np.arange(WIDTH), np.arange(WIDTH))) == 1).astype(np.float32)
LINES = np.stack([np.linspace(-1, 1, WIDTH) ** k for k in range(5)], 1).astype(np.float32)


def projected(w, x):
    q, _ = jnp.linalg.qr(w)
    return x - (x @ q) @ q.T


def residuals(lines, x):
    return x - lines @ jnp.linalg.solve(lines.T @ lines, lines.T @ x)


DIFFERENCES = {
    "Laplacian": lambda x: GRID.sum(1)[:, None] * x[0, :, :, 0] - GRID @ x[0, :, :, 0],
    "blur": lambda x: x[INNER] - conv(x, BLUR),
    "two blurs": lambda x: conv(x, NARROW) - jax.jit(conv)(x, BLUR),
    "windows": lambda x: x[INNER] - MEANS["windows of rows and columns"](x),
    "computed": lambda x: x[INNER] - MEANS["windows that are computed"](x),
    "matrix": lambda x: x[0, :, :, 0] - AVERAGES @ x[0, :, :, 0],
    "level of a pyramid": lambda x: x - resized(resized(x, WIDTH // 2), WIDTH),
    "edges of an average": edges,
}
DIFFERENCES = {name: (fn, (SMOOTH,), 0.01, relative) for name, fn in DIFFERENCES.items()}

T = np.linspace(-0.9, 0.9, 10)
POINTS = np.concatenate([np.stack([T, side * np.ones(10)], 1) for side in (-1, 1)])


def spline(points):
    squares = np.square(points[:, None] - POINTS).sum(-1)
    bends = squares * np.log(np.where(squares == 0, 1, squares))
    return np.concatenate([np.ones((len(points), 1)), points, bends], 1)


ROUND_IT = np.block([[spline(POINTS)], [np.zeros((3, 3)), spline(POINTS)[:, :3].T]])
ROUND_IT = np.linalg.inv(ROUND_IT)[:, :20].astype(np.float32)
PIXELS = spline(normal(100, 2)).astype(np.float32)


def of_both_halves(points):
    # Joined, the points are no longer read by the product itself.
    return PIXELS @ (ROUND_IT @ jnp.concatenate([points[:10], points[10:]]))


SPLINES = {
    "spline": lambda p: PIXELS @ (ROUND_IT @ p),
    "of a layer": lambda p: of_both_halves(np.eye(20, dtype=p.dtype) @ p + POINTS),
    "splines": lambda p: jnp.einsum("pk,bkc->bpc", PIXELS, ROUND_IT @ jnp.stack([p, 2 * p])),
}
NUISANCES = normal(WIDTH, 6)
NUISANCED = SMOOTH[0, :, :, 0] + 9 * normal(WIDTH, 6) @ NUISANCES.T
DIFFERENCES["projection"] = projected, (NUISANCES, NUISANCED), 0.01, relative
DIFFERENCES["fit of given lines"] = residuals, (LINES, SMOOTH[0, :, :2, 0] ** 5), 0.01, relative
POINTS = POINTS.astype(np.float32)
NEARBY = np.round(16 * normal(20, 2)).astype(np.float32) / 256  # 16 bits hold it
DIFFERENCES |= {name: (fn, (NEARBY,), 1e-3, relative) for name, fn in SPLINES.items()}


@pytest.mark.parametrize("matrix", [normal(16, 16), np.abs(normal(16, 16))])
@pytest.mark.parametrize("shape", [(2, 16), (16, 4), (16, 2)])
def test_other_matrices_are_read_in_16_bits(matrix, shape):
    x, matrix = jax.ShapeDtypeStruct(shape, np.float32), matrix.astype(np.float32)
    product = (lambda x: matrix @ x) if shape[0] == 16 else (lambda x: x @ matrix)
    (row,) = explain(product, x, policy=BF16).rows
    moves_points = shape == (16, 2) and matrix.min() < 0
    assert row.operands[0] == ("float32" if moves_points else "bfloat16")


decoded = jax.jit(lambda h, w: h @ w.T)
NO_PROJECTIONS = {
    "tied autoencoder": lambda p, x: x - (x @ p["w"]) @ p["w"].T - p["b"],
    "in parts": lambda p, x: x - decoded(x @ p["w"], p["w"]) - p["b"],
    "step of a solver": lambda p, x: (c := jnp.sin(x).T) - 1e-3 * x.T @ (x @ c),
}


@pytest.mark.parametrize("name", NO_PROJECTIONS)
def test_what_is_no_projection_keeps_its_products_in_16_bits(name):
    params, x = {"w": jnp.ones((32, 8)), "b": jnp.ones(32)}, jnp.ones((8, 32))
    loss = lambda p, x: jnp.mean(jnp.square(NO_PROJECTIONS[name](p, x)))
    rows = explain(loss, params, x, policy=BF16).rows
    products = [row.operands for row in rows if row.primitive == "dot_general"]
    assert products == [("bfloat16", "bfloat16")] * 2


SIGNAL = np.convolve(np.sign(normal(40)), np.ones(3), "same")
SIGNAL = np.lib.stride_tricks.sliding_window_view(SIGNAL, 8).astype(np.float32)


def updated(step):
    """What is left of a covariance after one measurement at a time, along all of them."""

    def run(x):
        p = lax.scan(lambda p, a: (step(p, a), None), 10 * jnp.eye(8, dtype=x.dtype), x)[0]
        return jnp.diag(p)

    return run


def gain(p, a):
    return p @ a / (1 + a @ p @ a)


def less(p, gain, a):
    return p - jnp.outer(gain, a @ p)


UPDATES = {
    "outer product": lambda p, a: p - jnp.outer(p @ a, a @ p) / (1 + a @ p @ a),
    "gain": lambda p, a: p - jnp.outer((p @ a) / (1 + a @ p @ a), a @ p),
    "square": lambda p, a: (lambda v: p - jnp.outer(v, v) * (1 / (1 + jnp.dot(a, v))))(p @ a),
    "columns": lambda p, a: p - (p @ a[:, None]) @ (a[None] @ p) / (1 + a[None] @ p @ a[:, None]),
    "in parts": lambda p, a: jax.jit(less)(p, jax.jit(gain)(p, a), a),
    "in parts of parts": jax.jit(lambda p, a: jax.checkpoint(less)(p, jax.jit(gain)(p, a), a)),
    "matrix of rank one": lambda p, a: p - jnp.outer(gain(p, a), a) @ p,
    "complement": lambda p, a: (jnp.eye(8) - jnp.outer(gain(p, a), a)) @ p,
    "moved complement": lambda p, a: p @ (jnp.eye(8) - jnp.outer(gain(p, a), a)).T,
    "complement in parts": lambda p, a: jax.jit(
        lambda k, a, p: (jnp.eye(8) - k[:, None] @ a[None]) @ p
    )(gain(p, a), a, p),
    "einsum": lambda p, a: p - jnp.einsum("i,j->ij", p @ a, a @ p) / (1 + a @ p @ a),
}
UPDATED = {name: (updated(fn), (SIGNAL,), 1e-3, relative) for name, fn in UPDATES.items()}

KINDS = {
    "differences": DIFFERENCES,
    "updates": UPDATED,
    "variances": EXPANDED,
    "chains": CHAINED,
    "indices": COUNTED,
    "gradients": ADDED,
}
DERIVED = {"gradients"}
ROWS = [
    pytest.param(jax.grad if kind in DERIVED else lambda fn: fn, *row, id=f"{kind}: {name}")
    for kind, rows in KINDS.items()
    for name, row in rows.items()
]


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("derived", "program", "args", "bound", "measured"), ROWS)
def test_it_is_as_near_to_float64_as_its_operands_are(
    derived, program, args, bound, measured, policy
):
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in args]
        exact = jax.tree.map(np.asarray, derived(program)(*wide))
    # No sum in 16 bits, in either direction.
    with jax.allow_f16_reductions(False):
        of_each = jax.jit(
            lambda *args: [derived(autocast(of(program), policy))(*args) for of in FORMS]
        )
        errors = [measured(got, exact) for got in of_each(*args)]
    assert max(errors) <= bound, errors


def test_a_computed_weight_that_is_gathered_adds_its_gradient_up_in_float32():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    product = lambda w, x: lax.psum(jnp.sum(x @ lax.all_gather(2 * w, "a", tiled=True)), "a")
    spec = jax.P("a")
    loss = jax.shard_map(product, mesh=mesh, in_specs=(spec, spec), out_specs=jax.P())
    x = jnp.concatenate([jnp.full((8, 16), 32.0), jnp.full((24, 16), 2.0**-7)])
    got = jax.jit(jax.grad(autocast(loss, BF16)))(jnp.ones((16, 16)), x)
    assert got[0, 0] == 2 * (256 + 3 / 16)


TARGETS = normal(8, mean=9000.0, deviation=30.0)
CHOSEN = {
    "maximum": lambda h: jnp.maximum(h, 10_000.0) - 10_000.0,
    "choice": lambda h: jnp.where(h > 0, h, 10_000.0) - jnp.where(h > 0, 0.0, 10_000.0 + 0 * h),
    "constants": lambda h: jnp.where(h > 0, h, TARGETS) - jnp.where(h > 0, 0.0, TARGETS),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_number_that_a_choice_returns_is_that_of_the_program(name):
    """In bfloat16 10,000 is 9,984: a difference from 10,000 was 16 and not 0."""
    x, w = normal(16, 8), normal(8, 8)
    fn = lambda x, w: CHOSEN[name](x @ w) @ w
    want, found = fn(x, w), autocast(fn, policy=BF16)(x, w)
    np.testing.assert_allclose(found, want, atol=0.02 * max(1.0, np.abs(want).max()))
