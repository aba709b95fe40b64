"""What mixed precision by rewriting a traced program gets wrong easily; see docs/traps.md."""

import contextlib
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jmp_autocast import BF16, autocast, compute_precision
from tests.support.jaxprs import (
    assert_dots_run_in,
    dot_dtypes,
    dtypes,
    equations,
    find,
    trace,
)

LOW, FULL = "bfloat16", "float32"
bf16 = functools.partial(autocast, policy=jnp.bfloat16)
computed = functools.partial(bf16, output_dtype="computed")

X = np.ones((8, 8), np.float32)


def transformer_layer(p, x):
    h = jax.nn.gelu((x @ p["up"]) * p["scale"] + p["bias"])
    h = jnp.where(h > 0, h, 0.0) * 0.5 + h / 2.0
    return (h @ p["down"]).sum()


def test_biases_scalars_and_literals_do_not_widen_activations():
    """Else the activations that are kept for the backward pass double."""
    keys = ("up", "down", "bias", "scale")
    shapes = ((8, 32), (32, 8), (32,), ())
    p = {k: np.ones(s, np.float32) for k, s in zip(keys, shapes, strict=True)}
    x = np.ones((16, 8), np.float32)
    forward = jax.make_jaxpr(lambda p, x: jax.vjp(bf16(transformer_layer), p, x))(p, x)
    kept = [v.aval for v in forward.jaxpr.outvars if getattr(v.aval, "shape", ()) == (16, 32)]
    assert kept
    assert {aval.dtype.name for aval in kept} <= {LOW, "bool"}


WITH_REDUCERS = {
    "scatter": lambda h: h.at[jnp.array([0, 1])].set(h[2:]),
    "scatter_add": lambda h: h.at[jnp.array([0, 0])].add(h[2:]),
    "scatter_mul": lambda h: h.at[jnp.array([0, 1])].multiply(h[2:], unique_indices=True),
    "scatter_max": lambda h: h.at[jnp.array([0, 0])].max(h[2:]),
    "scatter_apply": lambda h: h.at[jnp.array([0, 1])].apply(jnp.tanh),
    "reduce": lambda h: lax.reduce(h, np.float32(0), lambda a, b: a + 2 * b, (0,)),
    "reduce_window": lambda h: lax.reduce_window(
        h, np.float32(0), lambda a, b: a + b * b, (2, 2), (1, 1), "VALID"
    ),
    "max_pool": lambda h: lax.reduce_window(h, -np.inf, lax.max, (2, 2), (1, 1), "VALID"),
    "sum_pool": lambda h: lax.reduce_window(h, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
    "segment_sum": lambda h: jax.ops.segment_sum(h, jnp.array([0, 1, 0, 1]), 2),
    "cumulative": lambda h: lax.cummax(lax.cumsum(h)) + lax.cumlogsumexp(h),
    "sort": lambda h: jnp.sort(h) + lax.top_k(h, 4)[0],
    "sort_by_key": lambda h: lax.sort((h, h[::-1]), num_keys=1)[1],
    "scatter_min": lambda h: h.at[jnp.array([0, 0])].min(h[2:]),
    "solve": lambda h: jnp.linalg.solve(h + 4 * jnp.eye(4), h),
    "inverse": lambda h: jnp.linalg.inv(h + 4 * jnp.eye(4)),
    "reduce_precision": lambda h: lax.reduce_precision(h, 8, 7),
    "associative_scan": lambda h: lax.associative_scan(jnp.maximum, h),
}


@pytest.mark.parametrize("fn", WITH_REDUCERS.values(), ids=WITH_REDUCERS)
def test_primitives_that_carry_a_computation_compile(fn):
    """Dtypes that disagree inside them are told by XLA, not while tracing."""
    x = 0.7 * np.sin(np.arange(32, dtype=np.float32)).reshape(4, 8)
    loss = lambda x: jnp.sum(jnp.sin(fn(x @ x.reshape(8, 4))))
    out, expected = jax.jit(lambda x: (bf16(loss)(x), loss(x)))(x)
    np.testing.assert_allclose(out, expected, rtol=0.05, atol=0.05)


WITHOUT_A_GRADIENT = {"reduce", "reduce_window", "scatter_apply"}


@pytest.mark.parametrize("name", sorted({*WITH_REDUCERS} - WITHOUT_A_GRADIENT))
def test_gradients_of_primitives_that_carry_a_computation_compile(name):
    x = 0.7 * np.sin(np.arange(32, dtype=np.float32)).reshape(4, 8)
    loss = lambda x: jnp.sum(jnp.sin(WITH_REDUCERS[name](x @ x.reshape(8, 4))))
    gradients = jax.grad(loss), jax.grad(bf16(loss)), bf16(jax.grad(loss))
    expected, *found = jax.jit(lambda x: [gradient(x) for gradient in gradients])(x)
    for gradient in found:
        np.testing.assert_allclose(gradient, expected, rtol=0.1, atol=0.1)


def test_python_arguments_stay_python_values():
    def fn(x, train, mode="sum", scale=2):
        if train:
            x = x @ x
        return {"sum": jnp.sum, "max": jnp.max}[mode](x) * scale

    wrapped = bf16(fn)
    assert wrapped(X, True) == fn(X, True)
    assert wrapped(X, train=False, mode="max", scale=3) == 3


def test_closures_are_not_stale():
    weights = {"w": jnp.ones((8, 8))}
    fn = bf16(lambda x: x @ weights["w"])
    first = fn(X)
    weights["w"] = jnp.zeros((8, 8))
    np.testing.assert_array_equal(first, 8)
    np.testing.assert_array_equal(fn(X), 0)


def test_a_recorded_element_type_is_no_request():
    """Every `jnp.matmul` of float32 operands records ``preferred_element_type=float32``."""
    (eqn,) = find(trace(jnp.matmul, X, X), "dot_general")
    assert eqn.params["preferred_element_type"] == jnp.float32
    assert dot_dtypes(trace(computed(jnp.matmul), X, X)) == [(LOW,) * 3]
    asked = lambda x: lax.dot(x.astype(LOW), x.astype(LOW), preferred_element_type=jnp.float32)
    assert dot_dtypes(trace(computed(asked), X)) == [(LOW, LOW, FULL)]
    # Also where float32 is read in 16 bits: `exp` of 16 bits runs, and returns, in float32.
    behind = lambda x: asked(jnp.exp(x.astype(LOW)))
    assert dot_dtypes(trace(computed(behind), X)) == [(LOW, LOW, FULL)]


PRECISIONS = ["highest", "high", ("highest", "default"), "BF16_BF16_F32_X3", "F32_F32_F32"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_is_a_request(precision):
    fn = lambda x: jnp.dot(x, x, precision=precision)
    (ours,), (asked,) = (find(trace(f, X), "dot_general") for f in (bf16(fn), fn))
    assert ours.params == asked.params
    assert [v.aval for v in ours.invars] == [v.aval for v in asked.invars]


LOWERED = {
    "with_rules": BF16.with_rules({"dot_general": "lower_precision_fp"}),
    "with_scopes": BF16.with_scopes({"*net": "bfloat16"}),
    "in the code": BF16,
}


@pytest.mark.parametrize("precision", ["highest", "high", "BF16_BF16_F32_X3"])
@pytest.mark.parametrize("name", LOWERED)
def test_a_rule_or_a_scope_wins_over_a_precision(name, precision):
    in_code = compute_precision(LOW) if name == "in the code" else contextlib.nullcontext()

    def fn(x):
        with jax.named_scope("net"), in_code:
            return jnp.dot(x, x, precision=precision)

    (eqn,) = find(
        trace(autocast(fn, policy=LOWERED[name], output_dtype="computed"), X), "dot_general"
    )
    assert [v.aval.dtype for v in eqn.invars] == [LOW, LOW]
    assert eqn.params.get("precision") is None


def test_options_are_no_ambient_state():
    """A function jitted under other options must not come from JAX's cache."""
    layer = jax.jit(lambda x: x @ x)
    found = [
        dot_dtypes(trace(wrap(layer), X))[0][0]
        for wrap in (
            bf16,
            lambda f: f,
            functools.partial(autocast, policy="float16"),
            functools.partial(autocast, enabled=False),
            bf16,
        )
    ]
    assert found == [LOW, FULL, "float16", FULL, LOW]


def test_a_collective_sum_is_float32():
    """In 16 bits the sum over many devices would round at each step of the reduction."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    def total(x, w):
        h = x @ w
        return h + lax.psum(h, "data") + lax.pmean(h, "data")

    jaxpr = trace(bf16(total), X, X)
    assert_dots_run_in(LOW, jaxpr)
    sums = [eqn for eqn in equations(jaxpr) if eqn.primitive.name.startswith("psum")]
    assert sums
    assert {d for eqn in sums for d in dtypes((*eqn.invars, *eqn.outvars))} == {FULL}


def test_the_page_lists_every_test_here():
    """And every test that the page refers to exists."""
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs" / "traps.md").read_text(encoding="utf-8")
    here = set(re.findall(r"^def (test_\w+)", pathlib.Path(__file__).read_text(), re.M))
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page):
        assert f"def {name}(" in (root / path).read_text(encoding="utf-8")
        if path == "tests/scenarios/test_traps.py":
            here.discard(name)
    assert here == {"test_the_page_lists_every_test_here"}
