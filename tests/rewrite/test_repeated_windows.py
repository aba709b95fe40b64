"""Layers and lines that recur are emitted once, as if each equation was bound by itself."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, Policy, autocast
from jmp_autocast.interpreters.compat import Literal, name_stack, source_file_and_line
from jmp_autocast.interpreters.rewrite import rewriter
from jmp_autocast.interpreters.rewrite.repeated_windows import Window, repeated_windows
from tests.support.jaxprs import equations, flat_emission

N = 10
RNG = np.random.default_rng(0)
WEIGHTS = [jax.device_put(RNG.normal(0, 0.3, (8, 8)).astype(np.float32)) for _ in range(N)]
X = jax.device_put(RNG.normal(0, 1, (4, 8)).astype(np.float32))
MASK = np.tril(np.ones((4, 8), bool))
SCALE = np.linspace(0.5, 1.5, 8, dtype=np.float32)


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def residual(weights, x):
    for w in weights:
        h = jax.nn.gelu(norm(x) @ w)
        x = x + h @ w.T
    return x


def loop_in_a_line(weights, x):
    return functools.reduce(lambda x, w: jax.nn.relu(x @ w + w[0]), weights, x)


def named(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("inner"):
                h = jnp.tanh(x @ w) * 2.0
            x = x + jax.nn.softmax(h)
    return x


def partly_named(weights, x):
    for i, w in enumerate(weights):
        head = weights[0][i % 8]
        with jax.named_scope(f"layer_{i}"):
            x = x + jax.nn.softmax(norm(x) @ w) * head
    return x


def constants(weights, x):
    for w in weights:
        x = jnp.where(MASK, x @ w, -1e30 * x) * SCALE + jnp.sin(x)
        x = jnp.clip(x * SCALE, -3, 3)
    return x


def random(weights, x):
    key = jax.random.key(0)
    for w in weights:
        key, own = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(own, 0.9, x.shape), jax.nn.silu(x @ w), 0) / 0.9
    return x


def one_value_for_all(weights, x):
    shared = weights[0] @ weights[1]
    for w in weights:
        x = jnp.tanh(x @ w + x @ shared) + (x @ shared) * 0.1
    return x


def checkpoints(weights, x):
    layer = jax.checkpoint(lambda x, w: loop_in_a_line([w] * N, x))
    for w in weights[:2]:
        x = layer(x, w)
    return x


def scan(weights, x):
    return jax.lax.scan(lambda x, _: (residual(weights, x), None), x, None, length=2)[0]


def gradient_inside(weights, x):
    return x - jax.grad(lambda x: residual(weights, x).sum())(x)


PROGRAMS = [
    residual,
    loop_in_a_line,
    named,
    partly_named,
    constants,
    random,
    one_value_for_all,
    checkpoints,
    scan,
    gradient_inside,
]
POLICIES = [
    BF16,
    Policy(jnp.float16),
    Policy(jnp.bfloat16, level="compute"),
    Policy(jnp.bfloat16, level="by_hand"),
]
IN_A_SCOPE = BF16.with_rules({"*": "float32"}, scope="layer_3")


@pytest.fixture
def counted(monkeypatch):
    """The windows of each program that is rewritten."""
    found = []

    def counting(*args):
        jaxpr, steps = repeated_windows(*args)
        found.append([step for step in steps if isinstance(step, Window)])
        return jaxpr, steps

    monkeypatch.setattr(rewriter, "repeated_windows", counting)
    return found


def described(traced):
    return str(traced), [name_stack(eqn) for eqn in equations(traced)]


def source_lines(traced):
    return [source_file_and_line(eqn) for eqn in equations(traced)]


def trace(fn, *args):
    return jax.make_jaxpr(lambda *a: fn(*a))(*args)


@pytest.mark.parametrize(
    ("program", "policy"),
    [*[(p, q) for p in PROGRAMS for q in POLICIES], (named, IN_A_SCOPE)],
)
def test_a_program_is_that_of_flat_emission(program, policy, counted):
    fn = autocast(program, policy=policy)
    outlined = described(trace(fn, WEIGHTS, X))
    assert any(len(windows) > 2 for windows in counted)
    with flat_emission():
        assert described(trace(fn, WEIGHTS, X)) == outlined


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad])
def test_the_first_layer_keeps_its_source_lines(transform):
    fn = transform(lambda weights, x: jnp.sum(autocast(residual, policy=BF16)(weights, x)))
    found = source_lines(trace(fn, WEIGHTS, X))
    with flat_emission():
        flat = source_lines(trace(fn, WEIGHTS, X))
    assert {line for line in flat if __file__ in line} == {
        line for line in found if __file__ in line
    }
    if transform is not jax.grad:
        one_layer = len(flat) // N
        assert found[:one_layer] == flat[:one_layer]


@pytest.mark.parametrize(("program", "least"), [(named, 8), (partly_named, 15)])
def test_layers_begin_at_their_scopes(program, least, counted):
    trace(autocast(program, policy=BF16), WEIGHTS, X)
    (windows,) = counted
    ((layer, count),) = Counter(windows).most_common(1)
    assert count >= N - 2
    assert len(layer.eqns) >= least


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_flat_emission(program):
    # Cotangents of one value are added up window by window: float32 rounds in another order.
    fn = autocast(program, policy=BF16)
    gradient = lambda: jax.jit(jax.grad(lambda *a: jnp.sum(fn(*a) ** 2), (0, 1)))(WEIGHTS, X)
    outlined = gradient()
    with flat_emission():
        flat = gradient()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, outlined, flat)


@pytest.mark.parametrize("transform", [lambda f: jax.vmap(f, (None, 0)), jax.linearize, jax.vjp])
def test_transformations_see_flat_emission(transform):
    fn = autocast(residual, policy=BF16)

    def run(weights, xs):
        if transform in (jax.linearize, jax.vjp):
            return transform(lambda x: fn(weights, x), xs[0])[0]
        return transform(fn)(weights, xs)

    xs = jnp.stack([X, X * 2])
    outlined = jax.jit(lambda *a: run(*a))(WEIGHTS, xs)
    with flat_emission():
        np.testing.assert_array_equal(outlined, jax.jit(lambda *a: run(*a))(WEIGHTS, xs))


def test_what_differs_between_layers_is_not_shared():
    def program(weights, x):
        for i, w in enumerate(weights):
            x = jnp.sin(x @ w) * (1.0 + i) + jnp.cos(x) * 0.5
        return x

    program = trace(autocast(program, policy=BF16), WEIGHTS, X)
    muls = [e for e in equations(program) if e.primitive.name == "mul"]
    factors = [v.val for e in muls for v in e.invars if isinstance(v, Literal)]
    assert [x for x in factors if x != 0.5] == [1.0 + i for i in range(N)]


def test_layers_that_differ_share_their_lines(counted):
    def program(weights, x):
        for i, w in enumerate(weights):
            x = jax.nn.softmax(norm(x) @ w)
            x = x * (1.0 + i)
        return x

    trace(autocast(program, policy=BF16), WEIGHTS, X)
    (lines,) = counted
    assert len(lines) >= N
    assert all(len(line.eqns) < 12 for line in lines)


def test_each_callback_is_called():
    seen = []

    def program(weights, x):
        for i, w in enumerate(weights):
            x = jnp.sin(x @ w) + jax.pure_callback(lambda x, i=i: (seen.append(i), x)[1], x, x) * 2
        return x

    jax.block_until_ready(jax.jit(autocast(program, policy=BF16))(WEIGHTS, X))
    assert set(seen) == set(range(N))


def test_a_program_without_repeats_has_no_windows(counted):
    def program(w, x):
        h = jnp.tanh(x @ w)
        return jax.nn.softmax(h * 2.0 + x)

    trace(autocast(program, policy=BF16), WEIGHTS[0], X)
    assert not any(counted)


def test_outside_jit_nothing_is_outlined(counted):
    autocast(residual, policy=BF16)(WEIGHTS, X)
    with jax.disable_jit():
        trace(autocast(residual, policy=BF16), WEIGHTS, X)
    assert not counted
