"""The jaxprs that an equation holds, rewritten: nested deeply, and kept from call to call."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, CastPolicy, autocast, explain, register_rule
from jmp_autocast.interpreters.rewrite import rewritten_bodies
from tests.support.jaxprs import dot_dtypes, find
from tests.support.threads import at_once

W = jnp.eye(8) + 0.1
STACK = jnp.stack([W] * 3)
X = jnp.sin(jnp.arange(32.0)).reshape(4, 8)


# --- nested deeply ---------------------------------------------------------------------------


def nested(levels, wrap):
    def innermost(x):
        return jnp.tanh(x @ W)

    fn = innermost
    for _ in range(levels):
        fn = wrap(lambda x, fn=fn: fn(x) * 1.01)
    return fn


def in_a_branch(fn):
    return lambda x: lax.cond(x[0, 0] > -2, fn, lambda x: x, x)


WRAPS = {"jit": (jax.jit, 90), "checkpoint": (jax.checkpoint, 90), "cond": (in_a_branch, 50)}


@pytest.mark.parametrize(("wrap", "levels"), WRAPS.values(), ids=WRAPS)
def test_nested_deeply(wrap, levels):
    """A thread has a stack of its own, without the frames of pytest."""
    fn = nested(levels, wrap)
    job = functools.partial(jax.make_jaxpr(autocast(fn, policy=BF16)), X)
    jaxpr = at_once({"deep": job})["deep"]
    assert dot_dtypes(jaxpr) == [("bfloat16", "bfloat16", "bfloat16")]


@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_nested_calls_have_the_values_of_few(wrap):
    """More levels than are made innermost first, and as many calls without a level."""
    deep, flat = (
        jax.jit(jax.value_and_grad(lambda x, fn=fn: autocast(fn, policy=BF16)(x).sum()))(X)
        for fn in (nested(20, wrap), nested(20, lambda fn: fn))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3), deep, flat)


# --- kept from call to call ------------------------------------------------------------------


def step(h, w):
    return jnp.tanh(h @ w), None


PROGRAMS = {
    "relu": lambda w, x: jax.nn.relu(x @ w).sum(),
    "silu": lambda w, x: jax.nn.silu(x @ w).sum(),
    "relu6": lambda w, x: jax.nn.relu6(x @ w).sum(),
    "where": lambda w, x: jnp.where(x > 0, x @ w, 0.0).sum(),
    "scan": lambda w, x: lax.scan(step, x @ w, jnp.stack([w] * 3))[0].sum(),
    "softmax": lambda w, x: jax.nn.softmax(x @ w)[:, 0].sum(),
    "checkpoint": lambda w, x: jax.checkpoint(jnp.dot)(x, w).sum(),
    "vmap": lambda w, x: jax.vmap(lambda row: jax.nn.relu(row @ w))(x).sum(),
}
TRANSFORMS = {
    "call": lambda fn: fn,
    "grad": jax.grad,
    "jvp": lambda fn: lambda w, x: jax.jvp(fn, (w, x), (w, x)),
    "vmap": lambda fn: jax.vmap(fn, (0, None)),
}


def compiled(fn, *args):
    """What JAX compiles in a third call."""
    found = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            found.append(event)

    fn(*args), fn(*args)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fn(*args)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(found)


@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_call_compiles_nothing_that_the_plain_one_does_not(program, transform):
    w = STACK if transform is TRANSFORMS["vmap"] else W
    plain = compiled(transform(program), w, X)
    assert compiled(transform(autocast(program, policy=BF16)), w, X) <= plain


@jax.jit
def layer(w, x):
    return jnp.exp(x @ w)


def kept_dtype(w=W, x=X, *, policy=BF16):
    """In which dtype an eager call of a jitted layer computes."""
    return autocast(layer, policy=policy, output_dtype="computed")(w, x).dtype.name


@pytest.mark.usefixtures("jit_caches")
def test_what_is_kept_is_an_answer_to_the_whole_question():
    hits = lambda: rewritten_bodies._kept.cache_info().hits
    assert kept_dtype(policy=BF16.with_rules({"exp": "PROMOTE"})) == "bfloat16"
    before = hits()
    assert kept_dtype(policy=BF16.with_rules({"exp": "PROMOTE"})) == "bfloat16"
    assert hits() == before + 1
    assert kept_dtype(policy=FP16.with_rules({"exp": "PROMOTE"})) == "float16"
    assert kept_dtype() == "float32"
    register_rule("exp", CastPolicy.PROMOTE)
    assert kept_dtype() == "bfloat16"
    # A rule function may say something else each time.
    low = []
    rule = lambda eqn: CastPolicy.LOWER_PRECISION_FP if low else CastPolicy.FP32
    policy = BF16.with_rules({"exp": rule})
    assert kept_dtype(policy=policy) == "float32"
    low.append(True)
    assert kept_dtype(policy=policy) == "bfloat16"
    assert rewritten_bodies._kept.cache_info().maxsize <= 1024


@pytest.mark.usefixtures("jit_caches")
def test_a_precision_entered_later_holds():
    def product(x):
        return jax.jit(lambda y: jnp.sin(y))(x @ W) @ W

    fn = autocast(lambda x: jax.checkpoint(product)(x), policy=BF16.with_rules({"*": "float32"}))
    fn(X)
    with jax.default_matmul_precision("highest"):
        (first, *_) = find(jax.make_jaxpr(fn)(X), "dot_general")
    assert "HIGHEST" in str(first.params["precision"])


@pytest.mark.usefixtures("jit_caches")
def test_what_is_kept_holds_no_array_of_the_call():
    def called_once():
        array = jnp.ones((5, 8))  # a shape that no other test has, whose answer is kept
        fn = autocast(lambda w, x: (jax.nn.silu(x @ w + array) @ w).sum(), policy=BF16)
        jax.grad(fn)(W, jnp.ones((5, 8)))
        return weakref.ref(array)

    dead = called_once()
    gc.collect()
    assert dead() is None


@pytest.mark.usefixtures("jit_caches")
def test_explain_still_says_why():
    fn = autocast(lambda w, x: jax.nn.silu(x @ w).sum(), policy=BF16)
    fn(W, X)
    reasons = {row.primitive: row.reason for row in explain(fn, W, X).rows}
    assert reasons["dot_general"] == "LOWER_PRECISION"
