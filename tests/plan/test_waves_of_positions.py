"""At level "compute" sines of positions are rounded for 16-bit readers, and angles never."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import Policy, autocast, explain
from tests.fuzz.comparison import interpreted
from tests.support.jaxprs import equations
from tests.support.numerics import relative_error

FLOATS = ("float32", "bfloat16")
COMPUTE = Policy(jnp.bfloat16, level="compute")
WIDTH, LENGTH = 16, 8
X = np.random.default_rng(0).normal(size=(LENGTH, 2 * WIDTH)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(2 * WIDTH, 2 * WIDTH)).astype(np.float32) / 6
# bfloat16 has no 4001: as an angle it would be 4000, a radian off.
POSITIONS = 4001 + np.arange(LENGTH, dtype=np.int32)


def rotated(x, w, angles):
    q = (x @ w).reshape(LENGTH, 2, WIDTH)
    sin, cos = jnp.sin(angles).astype(q.dtype), jnp.cos(angles).astype(q.dtype)
    a, b = jnp.split(q, 2, axis=-1)
    q = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return jnp.einsum("qhd,khd->hqk", q, q)


def floats(positions):
    return positions[:, None].astype(jnp.float32)


def frequencies():
    return jnp.power(1e4, jnp.arange(WIDTH // 2).astype(jnp.float32) * (-2 / WIDTH))


def divided(x, w, positions):  # MaxText
    return rotated(x, w, floats(positions)[..., None] / frequencies() ** -1)


def contracted(x, w, positions):  # tunix
    highest = jax.lax.Precision.HIGHEST
    angles = jnp.einsum("ti,k->tik", floats(positions), frequencies(), precision=highest)
    return rotated(x, w, angles)


def counted(x, w, positions):
    return rotated(x, w, (4001.0 + jnp.arange(float(LENGTH)))[:, None, None] * frequencies())


def called(x, w, positions):
    return jax.checkpoint(jax.jit(divided))(x, w, positions)


def with_given_frequencies(x, w, positions):
    given = np.float32(1e4) ** (np.arange(WIDTH // 2, dtype=np.float32) * np.float32(-2 / WIDTH))
    return rotated(x, w, floats(positions)[..., None] * given)


SPELLINGS = [divided, contracted, counted, called, with_given_frequencies]


@pytest.mark.parametrize("fn", SPELLINGS)
def test_a_rotation_is_16_bits_at_compute_and_its_angles_are_not(fn):
    made = list(equations(jax.make_jaxpr(autocast(fn, policy=COMPUTE))(X, W, POSITIONS)))
    waves = [e for e in made if e.primitive.name in ("sin", "cos")]
    assert len(waves) == 2
    assert {v.aval.dtype.name for e in waves for v in (*e.invars, *e.outvars)} == {"float32"}
    rotations = [
        e for e in made if e.primitive.name == "mul" and e.outvars[0].aval.shape == (8, 2, 8)
    ]
    assert len(rotations) == 4
    assert {e.outvars[0].aval.dtype.name for e in rotations} == {"bfloat16"}


@pytest.mark.parametrize("fn", SPELLINGS)
def test_a_rotation_is_as_exact_as_by_hand(fn):
    def by_hand(x, w, positions):
        return fn(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), positions)

    exact = fn(X, W, POSITIONS)
    ours = relative_error(run(autocast(fn, policy=COMPUTE)), exact)
    assert ours < 1.05 * relative_error(run(by_hand), exact)
    assert ours < 0.006  # 0.9 with angles in bfloat16


def run(fn):
    traced = jax.jit(fn).trace(X, W, POSITIONS)
    return np.asarray(interpreted(traced, (X, W, POSITIONS))[0], np.float32)


def added(x, w, positions):
    return (w[positions % 8] + jnp.sin(floats(positions) * jnp.arange(2.0 * WIDTH))) * 0.5 @ w


def of_an_activation(x, w, positions):
    return (jnp.sin(jnp.exp(x @ w)) * (x @ w)) @ w


def of_positions_and_an_activation(x, w, positions):
    return (jnp.sin(floats(positions) * jnp.exp(x @ w)) * (x @ w)) @ w


def read_by_an_exp(x, w, positions):
    return jnp.exp(jnp.sin(floats(positions) / frequencies()))


@pytest.mark.parametrize(
    ("fn", "primitive", "level", "expected"),
    [
        (divided, "mul", "o1", "float32"),
        (added, "add", "compute", "bfloat16"),
        (added, "add", "o1", "float32"),
        (of_an_activation, "mul", "compute", "float32"),
        (of_positions_and_an_activation, "mul", "compute", "float32"),
    ],
)
def test_what_reads_the_wave(fn, primitive, level, expected):
    mixed = autocast(fn, policy=Policy(jnp.bfloat16, level=level), params=1)
    rows = explain(mixed, X, W, POSITIONS).rows
    row = [r for r in rows if r.primitive == primitive and r.results[0] in FLOATS][-1]
    assert row.results[0] == expected


def test_a_float32_reader_reads_the_wave_as_it_is():
    made = equations(jax.make_jaxpr(autocast(read_by_an_exp, policy=COMPUTE))(X, W, POSITIONS))
    assert {v.aval.dtype.name for e in made for v in e.outvars} <= {"float32", "int32"}


def test_keys_are_no_positions():
    def fn(x, w, key):
        key = jnp.where(x[0, 0] > 0, *jax.random.split(key))
        return x @ w + jax.random.normal(key, x.shape)

    key = jax.random.key(0)
    np.testing.assert_allclose(autocast(fn, policy=COMPUTE)(X, W, key), fn(X, W, key), atol=0.05)
