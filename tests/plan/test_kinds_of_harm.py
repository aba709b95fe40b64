"""Values that 16 bits get wrong by kind: programs of many fields, and the row that each needs.

A row of a table below is a program, its arguments and what is measured. The reference is the
program in float64. The bound is judged, not written: four times the error of the best of PyTorch's
rules, casts by hand (`tests/fuzz/by_hand.py`), and those with float32 islands (`Hand`), as a
careful author writes them. Without its row in the planner each program is beyond the bound. More
programs of each kind stand in `tests/fuzz/kinds.py`.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, Policy, autocast, explain
from jmp_autocast.interpreters.plan import consumers, equation, need_sweep, needs
from jmp_autocast.interpreters.plan.needs import Need
from jmp_autocast.interpreters.rewrite import rewritten_bodies
from tests.fuzz.by_hand import Rounded
from tests.fuzz.comparison import interpreted
from tests.fuzz.facts import CONTRACTIONS

RNG = np.random.default_rng(0)


def normal(*shape, mean=0.0, deviation=1.0):
    return (mean + deviation * RNG.standard_normal(shape)).astype(np.float32)


def relative(got, want):
    """The distance of two trees, in the norm of the second."""
    got, want = (
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
        for tree in (got, want)
    )
    size = np.linalg.norm(want) or 1.0
    return np.linalg.norm(got - want) / size if np.isfinite(got).all() else np.inf


def differing(got, want):
    """The share of choices that differ."""
    return float(np.mean(np.asarray(got) != np.asarray(want)))


def shapes(eqn):
    """Of the operands of a product."""
    is_product = eqn.primitive.name in CONTRACTIONS
    return [v.aval.shape for v in eqn.invars] if is_product else []


def conv(x, kernel, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, jnp.asarray(kernel, x.dtype), (1, 1), "VALID", dimension_numbers=numbers, **options
    )


# --- squares, multiplied out -----------------------------------------------------------------

POINTS = normal(200, 64, mean=1, deviation=0.1)
CENTERS = POINTS[:20] + normal(20, 64, deviation=0.05)
GAUSS = np.exp(-((np.arange(7) - 3.0) ** 2) / 4.5)
WINDOW = (np.outer(GAUSS, GAUSS) / GAUSS.sum() ** 2)[:, :, None, None].astype(np.float32)
IMAGE = (0.6 + 0.05 * np.sin(np.linspace(0, 20, 48)))[None, :, None, None] * np.ones((1, 1, 48, 1))
IMAGE = (IMAGE + 0.01 * RNG.standard_normal(IMAGE.shape)).astype(np.float32)


def nearest_without_its_own_norm(c, x):
    return jnp.argmin(jnp.sum(jnp.square(c), -1) - 2 * x @ c.T, -1)


@jax.jit
def distances(a, b):
    return (a * a).sum(-1)[:, None] + (b * b).sum(-1) + (-2.0 * a) @ b.T


def discrepancy(c, x):
    kernel = lambda a, b: jnp.exp(-distances(a, b)).mean()
    return kernel(x, x) + kernel(c, c) - 2 * kernel(x, c)


def of_features(c, x):
    z, e = jnp.tanh(x @ np.eye(64, dtype=np.float32)), jnp.tanh(c)
    return jnp.argmin(jnp.sum(z * z, -1)[:, None] + jnp.sum(e * e, -1) - 2 * z @ e.T, -1)


def local_contrast(_, x):
    return jnp.mean(conv(jnp.square(x), WINDOW) - jnp.square(conv(x, WINDOW)))


def structure_of_stacked(_, x):
    y = x + 0.01 * jnp.cos(50 * x)
    maps = jnp.concatenate([x, y, x * x, y * y, x * y], 0)
    m, n, s, t, c = jnp.split(conv(maps, WINDOW), 5)
    return jnp.mean((2 * (c - m * n) + 9e-4) / (s - m * m + t - n * n + 9e-4))


def covariances_of_features(c, x):
    y = x[:, ::-1]
    return jax.jit(lambda x, y: x.T @ y / 200 - jnp.outer(x.mean(0), y.mean(0)))(x, y)


def factorization_machine(v, x):
    return 0.5 * jnp.sum(jnp.square(x @ v) - jnp.square(x) @ jnp.square(v), -1)


def of_gram(_, x):
    g = x @ x.T
    return jnp.diag(g)[:, None] + jnp.diag(g) - 2 * g


def of_gram_called(_, x):
    g = jax.jit(lambda a: jnp.einsum("nd,md->nm", a, a))(x)
    d = jnp.einsum("ii->i", g)
    return jnp.sqrt(jnp.maximum(-2 * g + d[:, None] + d[None], 0))


def of_rows(_, x):
    g = lax.map(lambda row: x @ row, x)
    return jnp.diag(g)[:, None] + jnp.diag(g) - 2 * g


OF_GRAM = of_gram, of_gram_called, of_rows


def centered_kernel(_, x):
    k = x @ x.T / 64
    return k - k.mean(0) - k.mean(1, keepdims=True) + k.mean()


MACHINE = (normal(64, 8), np.eye(64, dtype=np.float32)[:50] + 1e-3 * normal(50, 64))
EXPANDED = [
    (nearest_without_its_own_norm, (CENTERS, POINTS), differing),
    (discrepancy, (CENTERS, POINTS), relative),
    (of_features, (CENTERS, POINTS), differing, lambda eqn: eqn.outvars[0].aval.shape == (200, 64)),
    (local_contrast, (0.0, IMAGE), relative),
    (structure_of_stacked, (0.0, IMAGE), relative),
    (covariances_of_features, (0.0, POINTS), relative),
    (factorization_machine, MACHINE, relative),
    *[(fn, (0.0, POINTS), relative) for fn in (*OF_GRAM, centered_kernel)],
]

# --- constants that take differences ---------------------------------------------------------

WAVE = np.sin(np.linspace(0, 3, 64)).astype(np.float32)
FIELD = (WAVE[:, None] * WAVE)[None, :, :, None]
LAPLACE = np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]], np.float32)[:, :, None, None]
SOBEL = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]], np.float32)[:, :, None, None]
HALF = np.array([[1, 1, 1, 1], [1, 1, -1, -1]], np.float32)
HAAR = np.einsum("ai,bj->ijab", HALF, HALF).reshape(4, 4, 1, 4) / 16
EACH = np.tile(LAPLACE, (1, 1, 1, 3))

DIFFERENCES = [
    (lambda _, u: conv(u, LAPLACE), (0.0, FIELD), relative),
    (lambda _, u: conv(u, SOBEL), (0.0, FIELD), relative),
    (lambda _, u: conv(u, HAAR)[..., 1:], (0.0, 5 + FIELD), relative),
    (
        lambda _, u: conv(jnp.tile(u, 3), EACH, feature_group_count=3),
        (0.0, FIELD),
        relative,
    ),
]

# --- products that are decomposed ------------------------------------------------------------

DESIGN = normal(100, 1) + normal(100, 8, mean=1, deviation=0.05)
ANSWERS = normal(100)
STATE = np.eye(6, dtype=np.float32) + 0.1 * np.eye(6, k=1, dtype=np.float32)
BASIS = normal(64, 64)
EYE = np.eye(8, dtype=np.float32)


def log_evidence(x, y):
    k = x @ x.T / 8 + 1e-3 * jnp.eye(len(x))
    return 2 * jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(k))))


def whitened(x, y):
    c = x - x.mean(0)
    values, _ = jnp.linalg.eigh(c.T @ c / len(x))
    return 1 / jnp.sqrt(values)


def fisher(x, y):
    return jnp.linalg.inv((x * jax.nn.sigmoid(y)[:, None]).T @ x)


def pseudo_inverse(x, y):
    return jax.checkpoint(lambda a: jnp.linalg.solve(a.T @ a, a.T))(x) @ y


def kalman(f, ys):
    h = np.eye(6, dtype=np.float32)[::2]

    def step(p, y):
        p = f @ p @ f.T + 1e-5 * jnp.eye(6)
        gain = jnp.linalg.solve(h @ p @ h.T + 1e-5 * jnp.eye(3), h @ p).T
        return (jnp.eye(6) - gain @ h) @ p, jnp.trace(p)

    return lax.scan(step, 100 * jnp.eye(6), ys)[1][-5:]


def gauss_newton(x, y):
    def body(i, w):
        r = jnp.tanh(x @ w) - y / 10
        j = (1 - jnp.tanh(x @ w) ** 2)[:, None] * x
        return w - jnp.linalg.solve(j.T @ j + 1e-4 * EYE, j.T @ r)

    return lax.fori_loop(0, 4, body, jnp.zeros(8))


def generalized(x, y):
    b = x.T @ x + 1e-4 * EYE
    factor = jnp.linalg.cholesky(b)
    return lax.linalg.triangular_solve(factor, x.T @ y[:, None], left_side=True, lower=True)


DECOMPOSED = [
    (fn, (DESIGN, ANSWERS), relative)
    for fn in (
        log_evidence,
        whitened,
        fisher,
        generalized,
    )
]
# What is in 16 bits there: the product after the solve, and `x @ w`.
DECOMPOSED += [
    (pseudo_inverse, (DESIGN, ANSWERS), relative, lambda eqn: shapes(eqn)[1:] == [(100,)]),
    (gauss_newton, (DESIGN, ANSWERS), relative, lambda eqn: shapes(eqn) == [(100, 8), (8,)]),
]
CHAINED = [(kalman, (STATE, np.zeros((30, 3), np.float32)), relative)]

# --- ranked values ---------------------------------------------------------------------------

# Numbers of bfloat16, each once in a row: the product with the identity is exact.
NUMBERS = np.concatenate([np.arange(2, 4, 1 / 64), np.arange(4, 8, 1 / 32)])
LOGITS = np.stack([RNG.permutation(NUMBERS)[:64] for _ in range(40)]).astype(np.float32)
SAME = np.eye(64, dtype=np.float32)


def router(w, x):
    return lax.top_k(jax.nn.sigmoid(x @ w), 4)[1]


def balanced_router(w, x):
    scores = jax.nn.sigmoid(x @ w["w"])
    return lax.top_k(scores + w["bias"], 4)[1]


def better_pairs(w, x):
    p = jax.nn.sigmoid(x @ w)
    return p[:, :, None] > p[:, None, :]


def used_as_well_in_a_checkpoint(w, x):
    part = lambda p: (jnp.argmax(p, -1), (p @ w).sum().astype(int) * 0)
    return jax.checkpoint(part)(jax.nn.sigmoid(x @ w))


def used_as_well_in_a_loop(w, x):
    row = lambda used, p: (used + (p @ w).sum(), jnp.argmax(p))
    return lax.scan(row, 0.0, jax.nn.sigmoid(x @ w))[1]


RANKED = [
    (fn, (SAME, LOGITS), lambda a, b: differing(jax.tree.leaves(a)[0], jax.tree.leaves(b)[0]))
    for fn in (
        router,
        better_pairs,
        used_as_well_in_a_checkpoint,
        used_as_well_in_a_loop,
    )
]
RANKED.append(
    (balanced_router, ({"w": SAME, "bias": normal(64, deviation=1e-4)}, LOGITS), differing)
)

# --- positions -------------------------------------------------------------------------------

FRAMES = np.linspace(0, 1, 512, dtype=np.float32).reshape(64, 8)
FREQUENCIES = normal(8, 16, deviation=20)
TAPS = normal(9, 1, 1)


def phases_of_frames(w, x):
    return jnp.sin(FRAMES @ w) * x


def normalized_rows(w, x):
    i = jnp.arange(512)
    return jnp.sin(((i // 16).astype(x.dtype) / 32).reshape(64, 8) @ w) * x


def meshed(w, x):
    a, b = jnp.meshgrid(jnp.arange(16.0) / 16, jnp.arange(16.0) / 16)
    return jnp.sin(jnp.stack([a, b], 0).reshape(64, 8) @ w) * x


def filtered_ramp(w, x):
    t = jnp.arange(512, dtype=jnp.float32) / 512
    out = lax.conv_general_dilated(
        20 * t.astype(w.dtype)[None, :, None],
        w,
        (1,),
        "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )
    return jnp.sin(out[0, :64] * 5) * x[:, :1]


def scaled_constant(w, x):
    return jnp.sin(jnp.transpose(jnp.asarray(FRAMES.T)) @ w + x)


ONES = np.ones((64, 16), np.float32)
POSITIONS = [
    (fn, (TAPS if fn is filtered_ramp else FREQUENCIES, ONES), relative)
    for fn in (
        phases_of_frames,
        normalized_rows,
        meshed,
        filtered_ramp,
        scaled_constant,
    )
]


# --- products that cannot pay ----------------------------------------------------------------

CELL = np.diag([50.0, 60.0, 70.0]).astype(np.float32) + normal(3, 3, deviation=0.1)
FRACTIONS = RNG.uniform(size=(100, 3)).astype(np.float32)
TURN = np.linalg.qr(normal(3, 3))[0].astype(np.float32)
CAMERA = np.array([[1000, 0, 512], [0, 1000, 512], [0, 0, 1]], np.float32)
AWAY = np.array([0.1, 0.2, 20], np.float32)
RAMP = np.linspace(0, 1, 256, dtype=np.float32) ** 2 + 3


def pixels(k, x):
    h = jnp.einsum("ij,nj->ni", k, (x - 0.5) + AWAY)
    return h[:, :2] / h[:, 2:]


def joints(r, x):
    """A chain of joints, each turned against the one before."""
    step = lambda pose, v: (pose @ r, pose @ v)
    return lax.scan(step, jnp.eye(3), x)[1]


def covariances(r, x):
    """Of splats, turned to the camera."""
    return jnp.einsum("ij,njk,lk->nil", r, x[:, :, None] * x[:, None], r)


def three_taps(k, x):
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x[None, :, None], k, (1,), "VALID", dimension_numbers=numbers)
    return y[0, 1:, 0] - y[0, :-1, 0]


CANNOT_PAY = [
    (pixels, (CAMERA, FRACTIONS), relative),
    (lambda r, x: jax.vmap(lambda v: r @ v)(x), (TURN, FRACTIONS), relative),
    (joints, (TURN, FRACTIONS), relative),
    (covariances, (TURN, FRACTIONS), relative),
    (three_taps, (np.full((3, 1, 1), 1 / 3, np.float32), RAMP), relative),
]


# --- gates of many steps -----------------------------------------------------------------------

MIXING, STEPS = normal(16, 16) / 4, normal(128, 16)


def gated(gate):
    """A state that is a moving average by gates of a product, as in HGRN and minGRU."""

    def run(w, x):
        h = x @ w
        step = lambda c, now: (now[0] * c + (1 - now[0]) * now[1],) * 2
        return lax.scan(step, jnp.zeros(16), (gate(h), h))[1]

    return run


def decaying(gate):
    """A state that gates of a product let decay, as in RWKV, RetNet, Mamba and xLSTM."""

    def run(w, x):
        h = x @ w
        step = lambda c, now: (now[0] * c + now[1],) * 2
        return lax.scan(step, jnp.zeros(16), (gate(h), h))[1]

    return run


def left(gate):
    """What is left after some steps: a transmittance, or a survival function."""
    return lambda w, x: jnp.cumprod(gate(x @ w), 0)[::16]


def written_out(gate):
    def run(w, x):
        h = x[:48] @ w
        g = gate(h)
        return functools.reduce(lambda c, k: c * g[k] + h[k], range(48), jnp.zeros(16))

    return run


def of_a_product_too(w, x):
    h = x @ w
    gate = 0.99 + 0.01 * jnp.tanh(h)
    states = lax.scan(lambda c, g: (c * g, c * g), jnp.ones(16), gate)[1]
    return states, (gate @ w)[:0]


GATES = {
    "gate of GLA": decaying(lambda z: jax.nn.sigmoid(1.3 * (z / 32 + 3.94))),
    "memory, written out": written_out(lambda z: jax.nn.sigmoid(1.3 * (z / 32 + 3.94))),
    "transmittance": left(lambda z: lax.erf(2 - z / 4)),
    "read by a product, too": of_a_product_too,
}
PRODUCTS = shapes
FACTORS = [(fn, (MIXING, STEPS), relative, PRODUCTS, name) for name, fn in GATES.items()]

# --- derivatives beyond float16 ----------------------------------------------------------------

SIZES = np.linspace(300.0, 2000.0, 32).astype(np.float32)
IN_FLOAT16 = {
    "ratio of products": lambda h: h / (2 * h),
    "fourth power": lambda h: jnp.tanh(lax.integer_pow(h, 4)),
    "normalized": lambda h: h / jnp.maximum(jnp.abs(h), 1),
    "linear attention": lambda h: (h * 0.5) / (h + 0.25 * h),
}
# x @ w of 1e-5 to 1e-4, whose squares are 0 in float16.
ROOTS = {
    "of a sum of squares": lambda h: jnp.sqrt(jnp.square(h) + (h[:, ::-1] / 2) ** 2),
    "of a product": lambda h: jnp.sqrt(jnp.maximum(h * h[:, ::-1], 0)),
    "in a checkpoint": jax.checkpoint(lambda h: jnp.sqrt(h * h)),
}


def gradient(fn):
    loss = lambda w, x: jnp.sum(fn(x @ w) @ (jnp.eye(32, dtype=x.dtype) / 1024))
    return lambda cast: jax.grad(cast(loss), argnums=1)


def of_float16(table, sizes=SIZES):
    args = np.eye(32, dtype=np.float32), sizes[None]
    return [(gradient(fn), args, relative, PRODUCTS, name) for name, fn in table.items()]


# --- exponentials beyond float16 ----------------------------------------------------------------

WEIGHTED = {"w": np.eye(8, dtype=np.float32), "v": normal(8, 5)}
SCORES = (RNG.integers(96, 112, (16, 8)) / 8).astype(np.float32)  # 12 to 14


def of_exp(fn):
    """A function of scores and of what they weigh."""
    return lambda w, x: fn(x @ w["w"], w["v"])


def accumulated(s, v):
    step = lambda c, row: (c + jnp.exp(row)[:, None].T @ v, jnp.exp(row).sum())
    total, sums = lax.scan(step, jnp.zeros((1, 5)), s)
    return total / sums.sum()


def of_all_steps(s, v):
    return lax.fori_loop(0, 16, lambda k, e: e + jnp.exp(s[k]), jnp.zeros(8)) @ v / 1e5


CAUSAL = np.tril(np.ones((16, 8), bool))
EXPONENTIALS = {
    "select": lambda s, v: jnp.where(CAUSAL, jnp.exp(s), 0.0) @ v / 1e5,
    "mask": lambda s, v: (2 * jnp.exp(s) * (s < 13).astype(s.dtype) + 1e-6) @ v / 1e5,
    "scores plus a bias, transposed": lambda s, v: (v.T @ (jnp.exp(s + v[:, 0]) / 2).T) / 1e5,
    "joined": lambda s, v: jnp.concatenate([jnp.exp(s), s], 0) @ v / 1e5,
    "branches": lambda s, v: jnp.exp(-lax.cond(s[0, 0] < 0, jnp.square, jnp.negative, s)) @ v / 1e5,
    "one of two": lambda s, v: jnp.exp(jnp.where(s > 0, s, -jnp.square(s))) @ v / 1e5,
    "two signs": lambda s, v: jnp.exp(-jnp.square(s) * jnp.full(8, -0.07)) @ v / 1e5,
    "two products": lambda s, v: (jnp.exp(s) @ v) @ v.T / jnp.exp(s).sum(1)[:, None],
    "linear attention": lambda s, v: (
        (k := jnp.exp(s) @ jnp.exp(s).T) @ s / k.sum(-1, keepdims=True)
    ),
    "scan": accumulated,
    "all steps": of_all_steps,
    # What is taken off is below some elements.
    "less a mean": lambda s, v: jnp.exp(20 * (s - s.mean(-1, keepdims=True))) @ v / 1e9,
    "segments that rise": lambda s, v: (
        jnp.exp((c := jnp.cumsum(s / 4, -1))[:, :, None] - c[:, None]) @ v / 1e9
    ),
}


# No product consumes what they rank or multiply up: they are right by the planner's first
# sentence, too.
BY_RULE = ("router", "better_pairs", "balanced_router")
BY_RULE += ("gate of GLA", "memory, written out", "transmittance")


def rows():
    reads_scores = lambda eqn: shapes(eqn) == [(16, 8), (8, 8)]
    kinds = {
        "cannot pay": (CANNOT_PAY, "_cannot_pay"),
        "expanded": (EXPANDED, Need.EXPANDED),
        "differences": (DIFFERENCES, "_needs_digits"),
        "decomposed": (DECOMPOSED, Need.DECOMPOSED),
        "chained": (CHAINED, Need.DECOMPOSED),
        "ranked": (RANKED, Need.SHARP),
        "positions": (POSITIONS, "_needs_digits"),
        "factors": (FACTORS, Need.SHARP),
        "derivatives": (of_float16(IN_FLOAT16), "derivative_leaves"),
        "roots": (of_float16(ROOTS, np.geomspace(1e-5, 1e-4, 32, dtype=np.float32)), Need.STEEP),
        "exponentials": (
            [
                (of_exp(fn), (WEIGHTED, SCORES), relative, reads_scores, name)
                for name, fn in EXPONENTIALS.items()
            ],
            "_needs_digits",
        ),
    }
    for kind, (table, needed) in kinds.items():
        for i, (fn, args, measure, *more) in enumerate(table):
            low = more[0] if more else lambda eqn: False
            name = fn.__name__ if fn.__name__ not in ("<lambda>", "run") else str(i)
            name = more[1] if len(more) > 1 else name
            row = (needed, "leads_to_no_product") if name in BY_RULE else (needed,)
            yield pytest.param(fn, args, measure, low, row, id=f"{kind}-{name}")


class Simple(Rounded):
    """One of the two rules; a solve reads float32, as in PyTorch."""

    def _target(self, eqn, xs, leaf, floats):
        if eqn.primitive.name == "custom_linear_solve":
            return jnp.float32
        return super()._target(eqn, xs, leaf, floats)


class Hand(Rounded):
    """What a careful author writes: what ``is_low`` says is in 16 bits, all else in float32."""

    def __init__(self, dtype, is_low):
        super().__init__(dtype, leaves_vote=True)
        self.is_low = is_low

    def _target(self, eqn, xs, leaf, floats):
        return (self.low if self.is_low(eqn) else jnp.float32) if floats else None


def without(row, monkeypatch):
    """Takes a row out of the planner: a need, a guard, or what promotes."""
    rewritten_bodies._kept.cache_clear()
    if isinstance(row, str):
        monkeypatch.setattr(equation, row, lambda *args: None)
        if row == "derivative_leaves":
            monkeypatch.setattr(consumers, "derivative_leaves", lambda *args: False)
        if row == "leads_to_no_product":
            leads = lambda eqn, marks, need, at: consumers.reads(eqn, marks, need | Need.LEADS, at)
            monkeypatch.setattr(need_sweep, "reads", leads)
    else:
        asked = {name: [r for r in rs if r.need != row] for name, rs in needs.REQUESTED.items()}
        monkeypatch.setattr(need_sweep, "REQUESTED", asked)


def in_float64(fn, args):
    """The program in float64, of the same numbers."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), args)
        return jax.device_get(fn(*wide))


def evaluated(fn, args):
    """What a program returns if each of its values has the dtype that its jaxpr says."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        traced = jax.jit(lambda *leaves: fn(*jax.tree.unflatten(structure, leaves)))
        leaves, structure = jax.tree.flatten(args)
        traced = traced.trace(*leaves)
        return jax.tree.unflatten(traced.out_tree, interpreted(traced, leaves))


def by_rule(rule, fn, args):
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    first = len(jax.tree.leaves(args[0]))
    leaf = [i < first for i in range(len(jax.tree.leaves(args)))]
    run = lambda *a: rule.run(closed, jax.tree.leaves(a), leaf)
    return lambda *a: jax.tree.unflatten(jax.tree.structure(out), run(*a))


LEAST = {relative: 1e-5}
"""What digits of float32 are worth; of choices one in fifty."""


def judge(wrapped, args, measure, dtype, low):
    """Returns what measures a program's error, the least one of the rules, and four times that.

    Args:
        wrapped: From a cast of functions, as `autocast` is one, to the program under it.
        args: The arguments.
        measure: The distance of two results.
        dtype: That of the rules.
        low: What `Hand` computes in it.
    """
    want = in_float64(wrapped(lambda f: f), args)
    error = lambda cast: measure(evaluated(wrapped(cast), args), want)
    rules = [Simple(dtype, True), Simple(dtype, False), Hand(dtype, low)]
    judged = min(error(lambda f, rule=rule: by_rule(rule, f, args)) for rule in rules)
    return error, judged, max(4 * judged, LEAST.get(measure, 0.02))


@pytest.mark.parametrize(("fn", "args", "measure", "low", "row"), list(rows()))
def test_values_are_right_and_wrong_without_the_row(fn, args, measure, low, row, monkeypatch):
    of_exponentials = args[0] is WEIGHTED
    args = jax.tree.map(jnp.asarray, args)
    # A derivative is of the rounded program: that of a rule's, too.
    of_derivatives = isinstance(args[1], jax.Array) and args[1].shape == (1, 32)
    policy = FP16 if of_derivatives or of_exponentials else BF16
    wrapped = fn if of_derivatives else lambda cast: cast(fn)
    error, judged, bound = judge(wrapped, args, measure, policy.compute_dtype, low)
    found = error(lambda f: autocast(f, policy=policy))
    assert found <= bound, (judged, found)
    for each in row:
        without(each, monkeypatch)
    removed = error(lambda f: autocast(f, policy=policy))
    assert bound < removed, (judged, found, removed)


# --- what keeps its 16 bits ---


def newton_schulz(w, x):
    g = w / (jnp.linalg.norm(w) + 1e-7)
    for _ in range(3):
        a = g @ g.T
        b = -4.775 * a + 2.0315 * (a @ a)
        g = 3.4445 * g + b @ g
    return g


def polynomial(w, x):
    a = w @ w.T
    return 2.0315 * (a @ a) - 4.775 * a + (1.5 * jnp.eye(64) - 0.5 * a)


def own_softmax(w, x):
    """Attention with q = k, written by hand."""
    q = x @ w
    scores = q @ q.T / 8
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ q


def contrastive(w, x):
    z = x @ w
    scores = z @ z.T / 0.07
    return jnp.mean(jax.nn.logsumexp(scores, -1) - jnp.diag(scores))


def attention(w, x):
    q = (x @ w).reshape(40, 4, 16)
    scores = jnp.einsum("qhd,khd->hqk", q, q) / 4
    scores = jnp.where(jnp.tril(jnp.ones((40, 40), bool)), scores, -1e9)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), q)


def adapted(p, x):
    return x @ p["w"] + 2.0 * ((x @ p["a"]) @ p["b"])


def gated_block(w, x):
    h = x @ w
    h = h + (jax.nn.silu(h @ w) * (h @ w)) @ w
    return (h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)) @ w


def denormalized(w, x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return ((x - mean) / jnp.sqrt(var + 1e-5)) @ w * jnp.sqrt(var) + mean


def cosines(w, x):
    z = x @ w
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return jax.nn.log_softmax(z @ z.T / 0.07)


def routed(w, x):
    h = x @ w
    weights, _ = lax.top_k(jax.nn.sigmoid(h @ w), 2)
    return (h * weights.sum(-1, keepdims=True)) @ w


def lstm(w, x):
    def step(carry, row):
        c, h = carry
        i, f, o, g = jnp.split(jnp.concatenate([row, h]) @ w, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    return lax.scan(step, (jnp.zeros(64), jnp.zeros(64)), x)[1]


def sampled(w, x):
    factor = jnp.linalg.cholesky(jnp.eye(64) * 2)
    return (x @ w) @ factor.T


def of_rank(rank):
    return {"w": normal(64, 64), "a": normal(64, rank), "b": normal(rank, 64)}


FAST = [
    *[
        (fn, normal(64, 64))
        for fn in (
            newton_schulz,
            attention,
            gated_block,
        )
    ],
    *[(fn, normal(64, 64)) for fn in (polynomial, own_softmax, contrastive)],
    *[(fn, normal(64, 64)) for fn in (denormalized, cosines, routed, sampled)],
    (lstm, normal(128, 256)),
    *[(adapted, of_rank(rank)) for rank in (2, 3, 4, 8)],
]


@pytest.mark.parametrize(("fn", "params"), [pytest.param(fn, p, id=fn.__name__) for fn, p in FAST])
@pytest.mark.parametrize("level", ["o1", "compute", "tensor_cores"])
def test_products_of_networks_keep_16_bits(fn, params, level):
    report = explain(fn, params, LOGITS, policy=Policy(jnp.bfloat16, level=level))
    products = [row for row in report.rows if row.primitive == "dot_general"]
    assert products
    assert {dtype for row in products for dtype in row.operands[:2]} == {"bfloat16"}


def flash(s, v):
    """Blocks of keys, each less the largest score so far."""

    def block(carry, now):
        out, m, total = carry
        scores, values = now
        larger = jnp.maximum(m, scores.max(-1))
        p, old = jnp.exp(scores - larger[:, None]), jnp.exp(m - larger)
        return (out * old[:, None] + p @ values, larger, total * old + p.sum(-1)), None

    start = jnp.zeros((16, 8)), jnp.full(16, -jnp.inf), jnp.zeros(16)
    blocks = jnp.stack([s, s / 2]), jnp.stack([v, v + 1])
    out, _, total = lax.scan(block, start, blocks)[0]
    return out / total[:, None]


def of_blocks(s, v):
    a, b = jnp.split(jnp.concatenate([s, s / 2], 1), 2, 1)
    m = jnp.maximum(a.max(1), b.max(1))[:, None]
    return jnp.exp(a - m) @ v + jnp.exp(b - m) @ v


AT_MOST_1 = {
    "softmax": lambda s, v: jax.nn.softmax(s) @ v,
    "masked softmax": lambda s, v: jax.nn.softmax(s, where=CAUSAL) @ v,
    "flash": flash,
    "over its sum": lambda s, v: (jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True)) @ v,
    "log of a sum": lambda s, v: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)) @ v,
    "square": lambda s, v: jnp.exp(-(s**2) / 2) @ v,
    "kernel": lambda s, v: jnp.exp(-v[0, 0] * jnp.sum((s[:, None] - v) ** 2, -1)) @ v,
    "capped": lambda s, v: jnp.exp(jnp.minimum(s, 5.0)) @ v + jnp.exp(jnp.clip(s, -20, 2)) @ v,
    "largest of blocks": of_blocks,
    "largest in a call": lambda s, v: (
        jnp.exp(s - jax.jit(lambda t: t.max(-1, keepdims=True))(s)) @ v
    ),
    "temperature": lambda s, v: jnp.exp((s - s.max(-1, keepdims=True)) / jnp.exp(v[0, 0])) @ v,
    "elu": lambda s, v: jax.nn.elu(s) @ v + jnp.where(s > 0, s + 1, jnp.exp(s)) @ v,
    "drawn": lambda s, v: (s + jnp.exp(s / 2) * jnp.sin(9 * s)) @ v,
    "bfloat16": lambda s, v: jnp.exp(s) @ v,
}


@pytest.mark.parametrize("name", AT_MOST_1)
def test_bounded_exponentials_enter_products_in_16_bits(name):
    policy = BF16 if name == "bfloat16" else FP16
    fn = of_exp(AT_MOST_1[name])
    report = explain(fn, {"w": SAME[:8, :8], "v": normal(8, 8)}, SCORES, policy=policy)
    products = [row for row in report.rows if row.primitive == "dot_general"]
    assert len(products) > 1
    assert {dtype for row in products for dtype in row.operands[:2]} == {policy.compute_dtype.name}


def test_explain_names_the_exponential():
    fn, args = of_exp(EXPONENTIALS["select"]), (WEIGHTED, SCORES)
    causes = [row.cause for row in explain(fn, *args, policy=FP16).rows]
    assert "operand 0 is an exp without a bound" in causes


def test_explain_names_the_need():
    rows = explain(fisher, DESIGN, ANSWERS, policy=BF16).rows
    causes = [row.cause for row in rows if row.primitive == "dot_general"]
    assert "a decomposition or a solve" in causes[0]
