"""Kernels: `in_compute_dtype`, and what is said of those that stay float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

from jmp_autocast import (
    BF16,
    CastPolicy,
    Decision,
    autocast,
    explain,
    full_precision,
    in_compute_dtype,
    register_rule,
)
from tests.support.jaxprs import assert_dots_run_in, dtypes, find, trace

# A rule that closes over a tracer keeps it: JAX's own trace of it leaks.
pytestmark = pytest.mark.usefixtures("jit_caches")

X, W = jnp.linspace(-1.0, 1.0, 2 * 8 * 8).reshape(2, 8, 8), jnp.eye(8) + 0.1
LOW = ("bfloat16",) * 3


def product_kernel(q, k, o):
    o[...] = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32).astype(o.dtype)


def product(q, k):
    shape = jax.ShapeDtypeStruct((8, 8), q.dtype)
    return pl.pallas_call(product_kernel, out_shape=shape, interpret=True)(q, k)


def attention_of(mask, decorate=in_compute_dtype):
    """As libraries do: the function is made inside the layer, and closes over the mask."""

    @jax.custom_vjp
    def toy_attention(q, k):
        return product(q, k) * mask.astype(q.dtype)

    def forward(q, k):
        return toy_attention(q, k), (q, k)

    def backward(saved, g):
        q, k = saved
        return product(g, k.T), product(g.T, q.T)

    toy_attention.defvjp(forward, backward)
    return decorate(toy_attention)


CAUSAL = np.tril(np.ones((8, 8), np.float32))


def layer(w, x, mask=CAUSAL):
    return x + jax.vmap(attention_of(mask))(x @ w, x @ w)


def masked(w, x):
    return layer(w, x, jnp.tril(jnp.ones((8, 8)) * x[0, 0, 0] ** 2))


def mapped(w, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(layer, **specs, check_vma=False)(w, x)


def scanned(w, x):
    return jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(w, h), None), x, jnp.stack([w, w]))[0]


PROGRAMS = {"layer": layer, "shard_map": mapped, "scan of checkpoints": scanned}
PROGRAMS["a computed mask"] = masked
PROGRAMS["jit"] = jax.jit(lambda w, x: layer(w, x))


def kernels(fn, policy, *args):
    """The dtypes of operands and results of each Pallas kernel."""
    return [
        dtypes([*e.invars, *e.outvars])
        for e in find(trace(autocast(fn, policy=policy), *args), "pallas_call")
    ]


@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
def test_a_kernel_runs_in_16_bits_forward_and_backward(fn):
    def loss(cast):
        return lambda w, x: jnp.sum(cast(fn)(w, x) ** 2)

    low = loss(functools.partial(autocast, policy=BF16))
    jax.eval_shape(fn, W, X)  # a trace without autocast is not taken for one with
    jaxpr = trace(jax.grad(low), W, X)
    calls = [dtypes([*e.invars, *e.outvars]) for e in find(jaxpr, "pallas_call")]
    assert len(calls) >= 3
    assert set(calls) == {LOW}
    assert jax.eval_shape(low, W, X) == jax.eval_shape(loss(lambda f: f), W, X)


def test_what_a_kernel_keeps_in_float32_stays():
    """As the sums of splash attention, which its rules hand on: these are traced later."""

    def sums_kernel(q, o, total):
        o[...], total[...] = q[...], jnp.exp(q[...].astype(jnp.float32))

    def forward(q):
        shapes = [jax.ShapeDtypeStruct(q.shape, d) for d in (q.dtype, jnp.float32)]
        out, total = pl.pallas_call(sums_kernel, out_shape=shapes, interpret=True)(q)
        return out, (q, total)

    def backward(saved, g):
        return (forward(g)[0] * saved[0],)

    sums_attention = jax.custom_vjp(lambda q: forward(q)[0])
    sums_attention.defvjp(forward, backward)

    def loss(w, x):
        step = jax.checkpoint(lambda h, w: (in_compute_dtype(sums_attention)(h @ w), None))
        return jnp.sum(jax.lax.scan(step, x, jnp.stack([w, w]))[0])

    calls = find(trace(jax.grad(autocast(loss, policy=BF16)), W, X), "pallas_call")
    assert len(calls) >= 3
    assert {dtypes([*e.invars, *e.outvars]) for e in calls} == {("bfloat16", "bfloat16", "float32")}


def test_the_code_around_it_wins():
    def pinned(w, x):
        with full_precision():
            return layer(w, x)

    assert kernels(pinned, BF16, W, X) == [("float32",) * 3]
    inner = autocast(layer, enabled=False)  # governs its own region
    assert kernels(lambda w, x: inner(w, x), BF16, W, X) == [("float32",) * 3]
    assert kernels(layer, BF16, W, X) == [LOW]
    assert find(trace(layer, W, X), "pallas_call")[0].invars[0].aval.dtype == jnp.float32


def test_a_kernel_that_only_a_derivative_calls():
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, x), lambda x, g: (in_compute_dtype(product)(g, x),))
    loss = autocast(lambda x: doubled(x).sum(), policy=BF16)
    calls = find(trace(jax.grad(loss), X[0]), "pallas_call")
    assert {dtypes(e.invars) for e in calls} == {LOW[:2]}


def test_static_arguments_and_kernels_in_kernels():
    seen = []

    @in_compute_dtype
    def outer(arrays, scale, *, name):
        inner = in_compute_dtype(lambda x: seen.append(x.dtype.name) or x)  # part of the outer one
        inner(jnp.ones(2))
        assert (scale, name) == (2, "a")
        return {"y": arrays["x"] * scale, "n": arrays["n"]}

    assert outer.__name__ == "outer"
    out = autocast(lambda x, n: outer({"x": x, "n": n}, 2, name="a"), policy=BF16)(X, np.arange(3))
    assert (out["y"].dtype, out["n"].dtype) == (jnp.float32, jnp.int32)
    assert set(seen) == {"float32"}


# --- what refuses -----------------------------------------------------------------------------


@in_compute_dtype
def only_float32(x):
    if x.dtype != jnp.float32:
        raise NotImplementedError("this kernel takes float32")
    return x * 2


@in_compute_dtype
def only_16_bits(x):
    if x.dtype == jnp.float32:
        raise TypeError("this kernel takes 16 bits")
    return x * 2


def test_a_kernel_that_refuses_says_what_it_was_called_with():
    with pytest.raises(NotImplementedError, match="takes float32") as error:
        jax.eval_shape(autocast(only_float32, policy=BF16), X)
    said = "in_compute_dtype called only_float32 with bfloat16 operands."
    assert error.value.__notes__[0] == said
    assert (only_float32(X) == 2 * X).all()


def test_a_kernel_for_16_bits_alone():
    low = autocast(lambda x: only_16_bits(x @ x), policy=BF16)
    assert jax.eval_shape(low, X[0]).dtype == jnp.float32


# --- what stays float32 is said ---------------------------------------------------------------


def big(x):
    shape = jax.ShapeDtypeStruct((128, 128), x.dtype)
    return pl.pallas_call(product_kernel, out_shape=shape, interpret=True)(x, x)


def test_a_kernel_in_float32_is_said():
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    with pytest.warns(UserWarning, match="leaves 50 % of the matmul FLOPs of <lambda> in kernels"):
        jax.eval_shape(autocast(lambda x: big(x @ x), policy=BF16), x)
    report = explain(lambda x: big(x @ x), x, policy=BF16)
    assert report.totals.wide_kernel_flops == 2 * 128**3
    assert "50 % of all products, run in float32" in str(report)
    low = in_compute_dtype(big)
    assert explain(lambda x: low(x @ x), x, policy=BF16).totals.wide_kernel_flops == 0


def test_what_an_author_says_of_a_kernel_counts():
    def kernel(x, o):
        o[...] = x[...]

    def fn(x):
        shape, cost = jax.ShapeDtypeStruct(x.shape, x.dtype), pl.CostEstimate(2**20, 0, 0)
        return pl.pallas_call(kernel, shape, interpret=True, cost_estimate=cost)(x)

    assert explain(fn, X, policy=BF16).totals.wide_kernel_flops == 2**20


# --- rules for kernels ---------------------------------------------------------------------

S = jnp.linspace(-0.7, 0.7, 64).reshape(8, 8)


def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


@jax.custom_vjp
def doubled(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


def program(x):
    return doubled(x @ x) @ x


@pytest.mark.parametrize("declared", ["float32", "float16"])
def test_a_kernel_gets_what_it_declares(declared):
    def loss(x):
        return jnp.sum((doubled((x @ x).astype(declared)).astype(jnp.float32) @ x) ** 2)

    jaxpr = trace(jax.grad(autocast(loss, policy=BF16)), S)
    (call,) = find(jaxpr, "pallas_call")
    assert dtypes([*call.invars, *call.outvars]) == (declared,) * 2
    assert_dots_run_in("bfloat16", jaxpr)


def test_a_rule_for_the_function_runs_its_kernel_in_16_bits():
    def in_16_bits(eqn):
        assert eqn.function == "doubled"
        dtype = eqn.compute_dtype
        return Decision(emit=doubled, operand_dtype=dtype, output_dtype=dtype)

    low = autocast(program, policy=BF16.with_rules({"custom_vjp_call": in_16_bits}))
    (call,) = find(trace(low, S), "pallas_call")
    assert dtypes([*call.invars, *call.outvars]) == ("bfloat16",) * 2
    np.testing.assert_allclose(low(S), program(S), atol=0.03)
    gradient = jax.grad(lambda x: low(x).sum())(S)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: program(x).sum())(S), atol=0.1)


@pytest.mark.parametrize("policy", ["LOWER_PRECISION_FP", "FP32", "PROMOTE"])
@pytest.mark.parametrize("name", ["pallas_call", "ffi_call", "pure_callback"])
def test_what_cannot_be_obeyed_is_refused_in_a_sentence(name, policy):
    message = f"'{name}' holds a program that was traced for the dtypes .* {policy} cannot"
    with pytest.raises(ValueError, match=message):
        BF16.with_rules({name: policy})
    with pytest.raises(ValueError, match=message):
        register_rule(name, CastPolicy[policy])
    assert BF16.with_rules({name: "keep"}).rules == (("*", name, CastPolicy.KEEP),)


def test_a_rule_function_is_refused_as_well():
    policy = BF16.with_rules({"pallas_call": lambda eqn: CastPolicy.LOWER_PRECISION_FP})
    with pytest.raises(ValueError, match="LOWER_PRECISION_FP cannot be obeyed"):
        jax.eval_shape(autocast(program, policy=policy), S)
