"""Requests, contexts, calls and arguments: programs of many fields, on values.

As in `test_kinds_of_harm`: a row is a program, its arguments and what is measured, against the
program in float64, and the bound is four times the error of the better of two rules and of casts by
hand. Without what the kind rests on in the package each program is beyond the bound. What is
computed in float64 inside of a function stands in `tests/transform/test_contexts.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast
from tests.fuzz.taken_out import TAKEN_OUT

from .test_kinds_of_harm import (
    CENTERS,
    LOGITS,
    MIXING,
    POINTS,
    SAME,
    STEPS,
    differing,
    gated,
    judge,
    normal,
    relative,
    shapes,
)

HIGHEST = lax.Precision.HIGHEST

# --- a precision that stands at the product is a request ---------------------------------------

SIGNAL = np.sin(np.linspace(0, 60, 256)).astype(np.float32)
TAPS = np.hanning(31).astype(np.float32)
COUPLING = normal(5, 7, 9)


def looked_up(table, x):
    """Rows of a table by a product, as TPUs gather."""
    chosen = jax.nn.one_hot(jnp.argmax(x[:, :64], -1), 64, dtype=x.dtype)
    return jnp.matmul(chosen, table, precision="highest")


def left_of_a_basis(basis, x):
    """What a reduced model leaves of a field."""
    basis = jnp.linalg.qr(basis)[0][:, :32]
    part = jnp.dot(x, basis, precision=HIGHEST)
    return x - jnp.einsum("nr,dr->nd", part, basis, precision=HIGHEST)


def filtered(taps, x):
    return jnp.convolve(x, taps, "valid", precision=HIGHEST)


def filtered_in_channels(taps, x):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x.reshape(2, 64, 2), jnp.tile(taps.reshape(-1, 1, 1), (1, 2, 4)), (1,), "SAME",
        dimension_numbers=numbers, precision=("highest", "highest"),
    )  # fmt: skip


def coupled(c, x):
    """A product of two spherical tensors."""
    return jnp.einsum("ijk,ni,nj->nk", c, x[:, :5], x[:, 5:12], precision="highest")


def energies_of_bands(w, x):
    """Log mel energies of windows."""
    power = jnp.square(jnp.abs(jnp.fft.rfft(x.reshape(8, 32))))
    return jnp.log(jnp.tensordot(power, jnp.abs(w), 1, precision="float32"))


def preconditioned(w, x):
    """The statistics of Shampoo."""
    return lax.dot_general(x, x, (((0,), (0,)), ((), ())), precision=HIGHEST) / len(x)


def by_algorithm(w, x):
    preset = lax.DotAlgorithmPreset.F32_F32_F32
    return lax.dot(x, w, precision=preset) - lax.dot(x[:1], w, precision=preset)


def correlated(w, x):
    """The context stands in the function, around a jitted helper."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(lambda a, b: a @ b.T - (a @ b.T).mean(0))(x, w)


def resized(_, x):
    """`jax.image` asks for it by default."""
    image = x.reshape(16, 16)
    return jnp.diff(jax.image.resize(image, (48, 40), "cubic") - image.mean(), axis=0)


def one_of_a_pair(w, x):
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=("high", "default")) - x


def steps_of_a_filter(w, x):
    step = lambda h, row: (jnp.matmul(row, w, precision=HIGHEST) + 0.5 * h,) * 2
    return lax.scan(step, jnp.zeros(8), x)[1]


NEAR_ONE = normal(200, 64, mean=1, deviation=0.01)
REQUESTS = [
    (looked_up, (normal(64, 16), NEAR_ONE), relative),
    (left_of_a_basis, (normal(64, 64), NEAR_ONE), relative),
    (filtered, (TAPS, SIGNAL), relative),
    (filtered_in_channels, (TAPS, SIGNAL), relative),
    (coupled, (COUPLING, NEAR_ONE), relative),
    (energies_of_bands, (normal(17, 6), SIGNAL), relative),
    (preconditioned, (0.0, NEAR_ONE), relative),
    (by_algorithm, (normal(64, 16), NEAR_ONE), relative),
    (correlated, (CENTERS, POINTS), relative),
    (resized, (0.0, SIGNAL), relative),
    (one_of_a_pair, (normal(64, 64), NEAR_ONE), relative),
    (steps_of_a_filter, (normal(64, 8), NEAR_ONE), relative),
]

# --- a call changes no plan ----------------------------------------------------------------------


@jax.custom_jvp
def squashed(x):
    return jax.nn.sigmoid(x)


squashed.defjvp(lambda xs, ts: (squashed(xs[0]), ts[0] * jax.grad(jnp.sum)(xs[0])))


@jax.custom_vjp
def activated(x):
    return jnp.tanh(x / 2)


activated.defvjp(lambda x: (activated(x), x), lambda x, g: (g * (1 - jnp.tanh(x / 2) ** 2) / 2,))


def experts_of_a_layer(w, x):
    return lax.top_k(jax.jit(jax.nn.sigmoid)(x @ w), 4)[1]


def decided_in_a_call(w, x):
    return jax.jit(lambda s: jnp.argmax(s, -1))(jax.checkpoint(jnp.tanh)(x @ w / 2))


def order_of_each(w, x):
    return lax.map(jnp.argsort, jax.nn.sigmoid(x @ w))


def made_in_a_loop(w, x):
    return jnp.argsort(lax.scan(lambda n, row: (n, jax.nn.sigmoid(row @ w)), 0, x)[1], -1)


def by_a_branch(w, x):
    return lax.cond(x[0, 0] > 0, jax.nn.sigmoid, jnp.tanh, x @ w).argsort(-1)


def by_a_rule(w, x):
    return lax.top_k(squashed(x @ w), 4)[1]


def by_a_rule_of_gradients(w, x):
    return jnp.argmin(activated(x @ w), -1)


def nested(w, x):
    inner = jax.jit(jax.checkpoint(jax.jit(lambda h: jax.nn.sigmoid(h))))
    return jax.jit(lambda s: jax.jit(lambda s: -s)(s).argsort(-1))(inner(x @ w))


def mapped(w, x):
    return jax.vmap(lambda row: jnp.argmax(jax.jit(jax.scipy.special.erf)(row @ w / 4)))(x)


CALLS = [
    (fn, (SAME, LOGITS), differing)
    for fn in (
        experts_of_a_layer,
        decided_in_a_call,
        order_of_each,
        made_in_a_loop,
        by_a_branch,
        by_a_rule,
        by_a_rule_of_gradients,
        nested,
        mapped,
    )
]
CALLS += [
    (
        gated(jax.jit(jax.checkpoint(lambda z: 0.998 + 0.001 * jnp.tanh(z)))),
        (MIXING, STEPS), relative, shapes,
    ),
    (
        lambda _, x: jax.jit(lambda g: jnp.linalg.inv(g + 1e-3 * jnp.eye(64)))(
            jax.checkpoint(lambda a: a.T @ a)(x)
        ),
        (0.0, POINTS), relative,
    ),
    (
        lambda c, x: jax.jit(lambda n, m, d: n[:, None] + m - 2 * d)(
            (x**2).sum(-1), (c**2).sum(-1), jax.jit(jnp.dot)(x, c.T)
        ),
        (CENTERS, POINTS), relative,
    ),
]  # fmt: skip

# --- which argument holds the parameters ---------------------------------------------------------

# The data are about 300, beside products of order 1: rounded as a bias is, they are off by one.
LEVEL = normal(16, mean=300)
READ = normal(64, 16)
READINGS = {"state": READ, "level": LEVEL}
WEIGHTS = {"input": normal(16, 16) / 4, "key": normal(16, 16) / 4}
TREE = {"key": WEIGHTS["key"], "tokens": WEIGHTS["input"]}


def ends(s, w):
    """Products end it: no reader in float32 asks for the sum."""
    return (s - s[:1]) @ w


def policy_of_a_robot(obs, policy):
    return ends(jnp.tanh(obs["state"] @ policy["input"]) + obs["level"], policy["key"])


def critic(batch, params):
    return ends(batch["state"] @ params["key"] + batch["level"], params["input"])


def flow(x, net):
    return ends(jnp.sin(x["state"] @ net["input"]) + x["level"], net["key"])


def physics(coords, field):
    residual = jax.checkpoint(lambda h: jnp.tanh(h @ field["key"]))(coords["state"])
    return ends(residual + coords["level"], field["input"])


def steps_of_a_plant(measured, model):
    step = lambda h, row: (jnp.tanh(h @ model["key"] + row @ model["input"]),) * 2
    states = lax.scan(step, jnp.zeros(16), measured["state"])[1]
    return ends(states + measured["level"], model["key"])


def language(cache, tree):
    h = jax.vmap(lambda row: row @ tree["tokens"])(cache["state"])
    return ends(h + cache["level"], tree["key"])


def audio(wave, taps):
    h = lax.conv_general_dilated(
        wave["state"][None], taps["input"][None], (1,), "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )[0]  # fmt: skip
    return ends(h + wave["level"], taps["key"])


def recommended(features, tables):
    h = jnp.einsum("nd,de->ne", features["state"], tables["key"])
    return ends(jax.jit(jnp.add)(h, features["level"]), tables["input"])


ARGUMENTS = [
    (fn, (READINGS, TREE if fn is language else WEIGHTS), relative, shapes)
    for fn in (
        policy_of_a_robot,
        critic,
        flow,
        physics,
        steps_of_a_plant,
        language,
        audio,
        recommended,
    )
]


def rows():
    kinds = {"requests": REQUESTS, "calls": CALLS, "arguments": ARGUMENTS}
    for kind, table in kinds.items():
        for i, (fn, args, measure, *more) in enumerate(table):
            low = more[0] if more else lambda eqn: False
            name = fn.__name__ if fn.__name__ not in ("<lambda>", "run") else str(i)
            yield pytest.param(kind, fn, args, measure, low, id=f"{kind}-{name}")


@pytest.mark.parametrize(("kind", "fn", "args", "measure", "low"), list(rows()))
def test_values_are_right_and_wrong_without_it(kind, fn, args, measure, low, monkeypatch):
    args = jax.tree.map(jnp.asarray, args)
    error, judged, bound = judge(lambda cast: cast(fn), args, measure, BF16.compute_dtype, low)
    found = error(lambda f: autocast(f, policy=BF16))
    assert found <= bound, (judged, found)
    TAKEN_OUT[kind](monkeypatch)
    removed = error(lambda f: autocast(lambda *a: f(*a), policy=BF16))
    assert bound < removed, (judged, found, removed)
