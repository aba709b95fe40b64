"""Settings of JAX: inside a function they hold for equations, around a call they ask nothing."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata

from jmp_autocast import BF16, autocast, full_precision, keep_less
from tests.support.jaxprs import find, trace

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.standard_normal((8, 8)) / 3, jnp.float32)
X = jnp.asarray(RNG.standard_normal((6, 8)), jnp.float32)
HIGH, HIGHEST = ((level,) * 2 for level in (lax.Precision.HIGH, lax.Precision.HIGHEST))
DEFAULT = (lax.Precision.DEFAULT,) * 2


@jax.custom_vjp
def precise(g):
    return jnp.mean(g)


precise.defvjp(lambda g: (jnp.mean(g), g), lambda g, ct: (jnp.full(g.shape, ct / g.size, g.dtype),))

# What float32 cannot hold: 1 + 1e-9, 1e8 + 1e-2, 16777217, and a phase of 1e9 turns.
IN_FLOAT64 = {
    "loop": lambda g: lax.fori_loop(0, 5, lambda i, s: s + jnp.sum(g) * 1e-10, jnp.float64(1)) - 1,
    "rule": lambda g: (precise(g + 1e8) - 1e8) * 48,
    "checkpoint": lambda g: jax.checkpoint(lambda g: jnp.sum(jnp.tanh(g * 1e-9 + 1.0)))(g),
}


def with_part(body):
    def fn(w, x):
        h = x @ w
        with jax.enable_x64(True):
            part = body(h.astype("float64")).astype("float32")
        return part + jnp.sum(jnp.tanh(h))

    return fn


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("wrap", [lambda f: autocast(f, policy=BF16), keep_less])
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_a_part_in_float64_is_computed_in_float64(name, wrap):
    # The operand is exact in 16 bits, so that only the part differs from JAX alone.
    fn, x, w = with_part(IN_FLOAT64[name]), jnp.round(X), jnp.eye(8)
    wrapped = wrap(fn)
    for transform in (lambda f: f, jax.jit):
        np.testing.assert_allclose(transform(wrapped)(w, x), fn(w, x), rtol=2e-2, atol=2e-2)
    try:
        expected = jax.jit(jax.grad(fn))(w, x)
    except (TypeError, ValueError, UserWarning):  # JAX itself has no derivative of some
        return
    found = jax.jit(jax.grad(wrapped))(w, x)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05 * scale)


def asks(x, word):
    with jax.default_matmul_precision(word):
        return x @ x


@jax.custom_vjp
def ruled(x):
    return x @ x


ruled.defvjp(lambda x: (x @ x, x), lambda x, ct: (ct @ x.T + x.T @ ct,))
LOW = "bfloat16"


def kept(x):
    with full_precision():
        return x @ x


@pytest.mark.parametrize("outside", ["highest", "float32", "high", "tensorfloat32"])
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: x @ x, [(LOW, None)]),
        (lambda x: lax.scan(lambda h, _: (jnp.tanh(h @ x), None), x, None, 3)[0], [(LOW, None)]),
        (lambda x: jax.grad(lambda x: ruled(x).sum())(x), [(LOW, None)] * 3),
        (kept, [("float32", "outside")]),
        (lambda x: asks(x, "highest"), [("float32", HIGHEST)]),
        (lambda x: kept(x) + autocast(kept, policy=BF16)(x), [("float32", "outside")] * 2),
        (lambda x: autocast(jnp.dot, enabled=False)(x, x), [("float32", "outside")]),
        (lambda x: jnp.abs(lax.complex(x, x) @ lax.complex(x, x)), [("complex64", "outside")]),
    ],
)
def test_a_precision_outside_is_no_request_and_holds_for_what_stays(program, expected, outside):
    around = HIGHEST if outside in ("highest", "float32") else HIGH
    # A new function: JAX holds the trace of one that it has seen.
    fn = lambda x: program(x)
    with jax.default_matmul_precision(outside):
        jaxpr = trace(autocast(fn, policy=BF16), X[:, :6])
    dots = find(jaxpr, "dot_general")
    found = [(eqn.invars[0].aval.dtype.name, eqn.params["precision"]) for eqn in dots]
    wanted = [(name, around if p == "outside" else p) for name, p in expected]
    assert [name for name, _ in found] == [name for name, _ in wanted]
    for (_, precision), (name, asked) in zip(found, wanted, strict=True):
        assert name == LOW or precision == asked


def test_a_default_inside_beats_the_one_outside_and_the_policy_beats_both():
    def fn(x):
        with full_precision():
            return asks(x, "default")

    with jax.default_matmul_precision("highest"):
        (plain,) = find(trace(autocast(fn, policy=BF16), X[:, :6]), "dot_general")
        policy = BF16.with_rules({"*": "high"})
        (said,) = find(trace(autocast(kept, policy=policy), X[:, :6]), "dot_general")
    assert plain.params["precision"] == DEFAULT
    assert said.params["precision"] == HIGH


def test_metadata_stays_with_the_equations_that_were_traced_in_it():
    def fn(x):
        with set_xla_metadata(part="head"):
            y = lax.exp(x)
        return lax.tanh(y) @ x

    lines = jax.jit(autocast(fn, policy=BF16)).lower(X[:, :6]).as_text().splitlines()
    marked = [line for line in lines if 'part = "head"' in line]
    assert len(marked) == 1
    assert "exponential" in marked[0]


def on_the_host(fn):
    """`compute_on` is a context in JAX 0.10, and a function of functions later."""
    if jax.__version_info__ < (0, 11):
        return compute_on("device_host")(jax.jit(fn))
    space = jax.memory.Space.Device
    return compute_on(fn, compute_type="device_host", out_memory_spaces=space)


def in_a_scan(w, x):
    step = lambda h, _: (on_the_host(lambda w, h: jnp.tanh(h @ w))(w, h), None)
    return lax.scan(step, x, None, length=3)[0]


def as_a_context(w, x):
    if jax.__version_info__ >= (0, 11):
        return on_the_host(lambda w, x: lax.exp(x @ w))(w, x)
    with compute_on("device_host"):
        return lax.exp(x @ w)


def placed(fn):
    """Which products and functions a lowered program computes on the host, and which not."""
    lines = jax.jit(fn).lower(W, X).as_text().splitlines()
    found = [
        (name, '_xla_compute_type = "host"' in line)
        for line in lines
        for name in ("dot_general", "exponential", "tanh")
        if f"stablehlo.{name}" in line
    ]
    return sorted(found)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("program", [in_a_scan, as_a_context])
def test_what_the_host_computes_stays_there(program, gradient):
    fn = lambda w, x: jnp.sum(program(w, x))
    cast = autocast(fn, policy=BF16)
    products = find(trace(cast, W, X), "dot_general")
    assert {v.aval.dtype for eqn in products for v in eqn.invars} == {jnp.dtype(jnp.bfloat16)}
    if gradient:
        fn, cast = jax.grad(fn), jax.grad(cast)
    assert placed(cast) == placed(fn)
    assert any(on_host for _, on_host in placed(cast))
    np.testing.assert_allclose(jax.jit(cast)(W, X), jax.jit(fn)(W, X), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mode", ["standard", "strict"])
def test_promotion_of_the_caller_or_the_program_changes_nothing(mode):
    def fn(w, x):
        with jax.numpy_dtype_promotion(mode):
            return jnp.sum(jax.nn.gelu(x @ w) * 2.0)

    plain = autocast(fn, policy=BF16)(W, X)
    with jax.numpy_dtype_promotion(mode):
        np.testing.assert_array_equal(autocast(fn, policy=BF16)(W, X), plain)


def in_rule(x):
    return jnp.sum(jax.nn.relu(jnp.log(-jnp.square(x @ x))))  # the culprit


def plain(x):
    y = jnp.square(x @ x)
    return jnp.log(-y).sum()  # the culprit


@jax.jit
def jitted_twice(x):
    return jax.jit(lambda y: jnp.sqrt(-1 - y * y))(jnp.tanh(x)).sum()  # the culprit


@pytest.mark.parametrize("fn", [plain, in_rule, jitted_twice])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: autocast(f, policy=BF16),
        lambda f: jax.jit(autocast(f, policy=BF16)),
        lambda f: autocast(jax.jit(f), policy=BF16),
    ],
)
def test_an_error_of_debug_nans_is_public_and_names_the_line(fn, wrap):
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        wrap(fn)(X[:, :6])
    text = "".join(traceback.format_exception(caught.value))
    assert "the culprit" in text
