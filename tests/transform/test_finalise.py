"""`finalise`: the values of a program, in primitives that are JAX's own."""

import functools
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jmp_autocast import BF16, Float8, Policy, autocast, cpu_kernels, finalise, float8
from jmp_autocast.backend import EVERY_ROUNDING
from jmp_autocast.interpreters import primitives
from jmp_autocast.interpreters.compat import (
    body_of,
    jaxpr_as_fun,
    name_stack,
    source_line,
)
from jmp_autocast.quantize_params import quantize_params
from tests.support.jaxprs import equations
from tests.support.numerics import normal

PARAMS = normal(0, w=(16, 32), v=(32, 16), b=(32,))
X = normal(1, x=(32, 16))["x"]
LABELS = np.arange(32) % 16


def own_primitives():
    """Each primitive that a module of the package defines."""
    return {
        primitive.name
        for room in (primitives, float8)
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")
        for name, primitive in vars(importlib.import_module(module.name)).items()
        if name.endswith("_p") and not hasattr(lax, name)
    }


OWN = own_primitives()


# What else than the accumulators of products these hold.
HOLDS = {
    "picked": ("pick", "source_view"),
    "float8": ("float8_dot", "tangent_carrier", "row_major"),
    "twice": ("float8_dot", "tangent_carrier"),
}


def names_in(jaxpr):
    """The primitives of a jaxpr and of all that it holds."""
    return {eqn.primitive.name for eqn in equations(jaxpr)}


def loss(params, x):
    h = jax.nn.relu(x @ params["w"] + params["b"])
    logits = jax.checkpoint(lambda h: jnp.tanh(h) @ params["v"])(h)
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(32), LABELS])


def labels_of_log_softmax(params, x):
    logits = jnp.tanh(x @ params["w"]) @ params["v"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], 1))


def in_a_loop(params, x):
    step = lambda h, _: (jnp.tanh(h @ params["w"]) @ params["v"], None)
    return jnp.sum(lax.cond(x[0, 0] > 0, lambda x: lax.scan(step, x, None, 2)[0], jnp.sin, x))


def solved(params, x):
    """JAX's solver holds jaxprs in a tuple of its own, which our description knows nothing of."""
    half = autocast(lambda w, y: y + w.T @ (w @ y), policy=BF16)
    solve = lambda f, b: b - f(b)
    system = functools.partial(half, params["w"][:, :16] / 8)
    return jnp.sum(lax.custom_linear_solve(system, x[0], solve, symmetric=True) ** 2)


FP8 = Policy(jnp.bfloat16, matmul=Float8(minimum=16, skip=(), emulate=True))
PROGRAMS = {
    "forward": autocast(loss, policy=BF16),
    "gradient": jax.grad(autocast(loss, policy=BF16)),
    "picked": jax.grad(
        autocast(labels_of_log_softmax, policy=Policy(jnp.bfloat16, level="compute"))
    ),
    "float8": jax.grad(autocast(loss, policy=FP8)),
    "twice": jax.grad(lambda p, x: jnp.sum(jax.grad(autocast(loss, policy=FP8))(p, x)["w"])),
    "mapped": jax.vmap(jax.grad(autocast(loss, policy=BF16)), (None, 0)),
    "solved": jax.grad(solved),
}


def results(fn, *args, holds=("accumulate",), run=lambda evaluate: evaluate):
    """What a jaxpr and its finalised form return, evaluated equation by equation."""
    closed = jax.make_jaxpr(fn)(*args)
    final = finalise(closed)
    assert {*holds} <= OWN & names_in(closed)
    assert not OWN & names_in(final)
    assert final.out_avals == closed.out_avals
    return (run(jaxpr_as_fun(jaxpr))(*jax.tree.leaves(args)) for jaxpr in (final, closed))


@pytest.fixture
def without_kernels(monkeypatch):
    """A CPU that multiplies in float32, as a finalised program does: the same sums."""
    monkeypatch.setattr(cpu_kernels, "cpu_features", lambda: frozenset())
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("without_kernels")
def test_values_are_the_same_bit_for_bit():
    """One test of all programs: each change of the CPU's kernels empties JAX's caches."""
    for name, program in PROGRAMS.items():
        x = jnp.stack([X, -X]) if name == "mapped" else X
        found, expected = results(program, PARAMS, x, holds=HOLDS.get(name, ("accumulate",)))
        equal = functools.partial(np.testing.assert_array_equal, err_msg=name)
        jax.tree.map(equal, found, expected)


@pytest.mark.usefixtures("without_kernels")
def test_weights_in_8_bits():
    half = autocast(loss, policy=FP8)
    found, expected = results(
        half, quantize_params(half, PARAMS, X), X, holds=("dequantize", "float8_dot")
    )
    np.testing.assert_array_equal(found, expected)


def test_a_loop_and_branches():
    """XLA compiles each as a whole, and need not round as often unless it is told to."""
    run = functools.partial(jax.jit, compiler_options=EVERY_ROUNDING)
    found, expected = results(jax.grad(autocast(in_a_loop, policy=BF16)), PARAMS, X, run=run)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.01 * np.max(np.abs(other)))


def test_what_holds_nothing_of_ours_stays_the_object_that_it_is():
    closed = jax.make_jaxpr(loss)(PARAMS, X)
    assert finalise(closed) is closed
    final = finalise(jax.make_jaxpr(PROGRAMS["gradient"])(PARAMS, X))
    assert finalise(final) is final


def test_equations_that_share_a_jaxpr_still_do():
    layer = jax.jit(lambda h, w: jnp.tanh(h @ w))
    chain = autocast(
        lambda w, h: functools.reduce(lambda h, _: layer(h, w), range(9), h), policy=BF16
    )
    closed = jax.make_jaxpr(chain)(np.eye(16, dtype=np.float32), X)
    before, after = (
        [id(e.params["jaxpr"]) for e in jaxpr.eqns if e.primitive.name == "jit"]
        for jaxpr in (closed, finalise(closed))
    )
    assert len(after) == 9
    assert len({*after}) == len({*before}) <= 3


def test_an_open_jaxpr_and_lines_and_scopes():
    def scoped(params, x):
        with jax.named_scope("head"):
            return jnp.sum(x @ params["v"].T)

    closed = jax.make_jaxpr(jax.grad(autocast(scoped, policy=BF16)))(PARAMS, X)
    final = finalise(body_of(closed))
    dots = [e for e in final.eqns if e.primitive.name == "dot_general"]
    assert dots
    assert all("head" in name_stack(e) and "scoped" in source_line(e) for e in dots)


def test_platforms():
    closed = jax.make_jaxpr(PROGRAMS["gradient"])(PARAMS, X)
    dots = {
        platform: {
            e.invars[0].aval.dtype.name
            for e in finalise(closed, platform=platform).eqns
            if e.primitive.name == "dot_general" and e.outvars[0].aval.dtype == jnp.float32
        }
        for platform in ("cpu", "gpu", "tpu")
    }
    assert dots == {"cpu": {"float32"}, "gpu": {"bfloat16"}, "tpu": {"bfloat16"}}


def test_a_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    half = jax.value_and_grad(autocast(lambda w, x: jnp.sum(jnp.sin(x @ w)), policy=BF16))
    mapped = jax.shard_map(
        lambda w, x: lax.psum(half(w, x), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    w = PARAMS["w"]
    closed = jax.make_jaxpr(mapped)(w, X)
    final = finalise(closed)
    assert OWN & names_in(closed)
    assert not OWN & names_in(final)
    found, expected = (jax.jit(jaxpr_as_fun(j))(w, X) for j in (final, closed))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=0.1), found, expected)
