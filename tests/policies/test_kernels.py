"""Kernels by policy: what a name finds, in which dtypes it runs, and what a wrong one says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

from jmp_autocast import BF16, BY_HAND, FP16, Policy, autocast, explain, full_precision
from jmp_autocast.policies.kernels import AS_BY_HAND, KNOWN
from tests.support.jaxprs import dtypes, find, trace

# A rule that closes over a tracer keeps it: JAX's own trace of it leaks.
pytestmark = pytest.mark.usefixtures("jit_caches")

X, W = jnp.linspace(-1.0, 1.0, 2 * 8 * 8).reshape(2, 8, 8), jnp.eye(8) + 0.1
LOW = ("bfloat16",) * 3


def product_kernel(q, k, o):
    o[...] = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32).astype(o.dtype)


def product(q, k):
    shape = jax.ShapeDtypeStruct((8, 8), q.dtype)
    return pl.pallas_call(product_kernel, out_shape=shape, interpret=True)(q, k)


def attention_of(mask):
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
    return toy_attention


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
by_name = BF16.with_kernels({"toy_attention": "compute"})


def kernels(fn, policy, *args):
    """The dtypes of operands and results of each Pallas kernel."""
    return [
        dtypes([*e.invars, *e.outvars])
        for e in find(trace(autocast(fn, policy=policy), *args), "pallas_call")
    ]


@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
def test_a_named_function_runs_in_16_bits_forward_and_backward(fn):
    def loss(cast):
        return lambda w, x: jnp.sum(cast(fn)(w, x) ** 2)

    low = loss(functools.partial(autocast, policy=by_name))
    jax.eval_shape(fn, W, X)  # a trace without rules is not taken for one with
    jaxpr = trace(jax.grad(low), W, X)
    calls = [dtypes([*e.invars, *e.outvars]) for e in find(jaxpr, "pallas_call")]
    assert len(calls) >= 3
    assert set(calls) == {LOW}
    assert jax.eval_shape(low, W, X) == jax.eval_shape(loss(lambda f: f), W, X)


@pytest.mark.parametrize("fn", [layer, scanned])
def test_gradients_of_a_named_function_are_near_float32(fn):
    def grad(fn):
        return jax.grad(lambda w, x: jnp.sum(fn(w, x) ** 2))

    both = jax.jit(lambda *a: (grad(autocast(fn, policy=by_name))(*a), grad(fn)(*a)))
    got, want = both(W, X)
    np.testing.assert_allclose(got, want, atol=0.05 * float(jnp.abs(want).max()))


@pytest.mark.parametrize(
    ("pattern", "is_low"),
    [
        ("toy_attention", True),
        ("*attention*", True),
        ("tests.policies.test_kernels.*", True),
        ("product_kernel", True),
        ("*/decoder/*", True),
        ("*/encoder/*", False),
        ("toy_atention", False),
    ],
)
@pytest.mark.filterwarnings("ignore:.* calls no function or kernel")
def test_what_a_pattern_finds(pattern, is_low):
    def program(w, x):
        with jax.named_scope("decoder"):
            return layer(w, x)

    (found,) = kernels(program, BF16.with_kernels(pattern), W, X)
    assert found == (LOW if is_low else ("float32",) * 3)


def test_what_a_named_function_keeps_in_float32_stays():
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
        step = jax.checkpoint(lambda h, w: (sums_attention(h @ w), None))
        return jnp.sum(jax.lax.scan(step, x, jnp.stack([w, w]))[0])

    policy = BF16.with_kernels(f"{__name__}.*")
    calls = find(trace(jax.grad(autocast(loss, policy=policy)), W, X), "pallas_call")
    assert len(calls) >= 3
    assert {dtypes([*e.invars, *e.outvars]) for e in calls} == {("bfloat16", "bfloat16", "float32")}


def test_of_several_names_the_last_wins_and_code_beats_all():
    def pinned(w, x):
        with full_precision():
            return layer(w, x)

    policy = by_name.with_kernels({"*attention": "declared"})
    assert kernels(layer, policy, W, X) == [("float32",) * 3]
    assert kernels(layer, policy.with_kernels("toy_attention"), W, X) == [LOW]
    assert kernels(pinned, by_name, W, X) == [("float32",) * 3]
    inner = autocast(layer, enabled=False)  # governs its own region
    with pytest.warns(UserWarning, match="'toy_attention'"):
        assert kernels(lambda w, x: inner(w, x), by_name, W, X) == [("float32",) * 3]
    assert trace(layer, W, X) is not None  # nothing stays behind
    assert find(trace(layer, W, X), "pallas_call")[0].invars[0].aval.dtype == jnp.float32


def test_a_rule_that_only_a_derivative_calls_is_found_there():
    loss = autocast(lambda w, x: layer(w, x).sum(), policy=BF16.with_kernels("product_kernel"))
    calls = find(trace(jax.grad(loss), W, X), "pallas_call")
    assert {dtypes(e.invars) for e in calls} == {LOW[:2]}


# --- other kernels ----------------------------------------------------------------------------


@functools.partial(jax.lax.composite, name="lib.doubled")
def made_before(x):
    return x @ x


def plain(x):  # a function without rules, found by its whole path
    return product(x, x)


def ffi(x):
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("my_target", kind)(x)


def composite(x):
    return jax.lax.composite(lambda x: x @ x, name="lib.product")(x)


OTHERS = {
    "ffi": (ffi, "my_target", "ffi_call"),
    "composite": (composite, "lib.product", "composite"),
    "a whole path": (lambda x: plain(x), f"{__name__}.plain", "pallas_call"),
    "a composite made before": (lambda x: made_before(x), f"{__name__}.made_before", "composite"),
}


@pytest.mark.parametrize(("fn", "name", "primitive"), OTHERS.values(), ids=OTHERS)
def test_other_kernels(fn, name, primitive):
    low = autocast(lambda x: fn(x) + 1.0, policy=BF16.with_kernels(name))
    jaxpr = trace(low, X[0])
    (call,) = find(jaxpr, primitive)
    assert set(dtypes([*call.invars, *call.outvars])) == {"bfloat16"}
    assert jaxpr.out_avals[0].dtype == jnp.float32


def grouped(x, w, preferred_element_type=jnp.float32):  # as a grouped product of a library
    return jnp.dot(x, w, preferred_element_type=preferred_element_type)


with_a_rule = jax.custom_vjp(grouped, nondiff_argnums=(2,))
with_a_rule.defvjp(lambda x, w, d: (x @ w, None), lambda d, _, g: (g, g))


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (lambda x: grouped(x, x, jnp.float32), "bfloat16"),
        (lambda x: grouped(x, w=x, preferred_element_type="float32"), "bfloat16"),
        (lambda x: grouped(x, x), "float32"),  # a default is the library's own
        (lambda x: with_a_rule(x, x, jnp.float32), "bfloat16"),
    ],
    ids=["by position", "by name", "by default", "of a rule"],
)
def test_an_argument_that_names_the_dtype_of_results(call, result):
    """The operands are 16 bits, and so is what the kernel writes."""
    jaxpr = trace(autocast(call, policy=BF16.with_kernels(f"{__name__}.grouped")), X[0])
    (product,) = find(jaxpr, "dot_general")
    assert dtypes([*product.invars, *product.outvars]) == ("bfloat16", "bfloat16", result)
    assert jaxpr.out_avals[0].dtype == jnp.float32


def test_a_partitioned_function():
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def partitioned(x):
        return x * 2

    partitioned.def_partition(
        infer_sharding_from_operands=None, partition=None, sharding_rule="i j k -> i j k"
    )
    (call,) = find(
        trace(autocast(partitioned, policy=BF16.with_kernels("partitioned")), X),
        "custom_partitioning",
    )
    assert dtypes(call.invars) == ("bfloat16",)


# --- what refuses -----------------------------------------------------------------------------


@jax.custom_jvp
def only_float32(x):
    if x.dtype != jnp.float32:
        raise NotImplementedError("this kernel takes float32")
    return x * 2


only_float32.defjvps(lambda g, out, x: 2 * g)


@jax.custom_jvp
def only_16_bits(x):
    if x.dtype == jnp.float32:
        raise TypeError("this kernel takes 16 bits")
    return x * 2


only_16_bits.defjvps(lambda g, out, x: 2 * g)


def test_a_function_that_refuses_is_named_with_its_error():
    policy = BF16.with_kernels("*float32*")
    message = "only_float32 run with bfloat16 operands.*'compute_or_declared'.*takes float32"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(autocast(only_float32, policy=policy), X)
    either = BF16.with_kernels({"*float32*": "compute_or_declared"})
    assert (autocast(only_float32, policy=either)(X) == 2 * X).all()


def test_a_function_for_16_bits_alone():
    low = autocast(lambda x: only_16_bits(x @ x), policy=BF16.with_kernels("only_16_bits"))
    assert jax.eval_shape(low, X[0]).dtype == jnp.float32


def test_a_name_that_matches_nothing_warns():
    for name, hint in (
        ("toy_atention", "Did you mean 'toy_attention'"),
        ("gmm", "It calls product"),
    ):
        with pytest.warns(UserWarning, match=f"layer calls no function.*'{name}'.*{hint}"):
            jax.eval_shape(autocast(layer, policy=BF16.with_kernels(name)), W, X)
        report = explain(layer, W, X, policy=BF16.with_kernels(name))
        assert report.totals.unmatched_scopes == (name,)
    jax.eval_shape(autocast(layer, policy=Policy("bfloat16", kernels=AS_BY_HAND)), W, X)


def test_the_preset_is_level_compute_with_the_gradients_of_weights_and_kernels():
    fields = {"level": "compute", "weight_gradients": "compute", "kernels": AS_BY_HAND}
    assert Policy("bfloat16", **fields) == BY_HAND
    assert BF16.with_kernels(list(KNOWN)).kernels == AS_BY_HAND


def test_known_kernels_have_patterns_and_a_source():
    assert all(known.patterns and known.source for known in KNOWN.values())


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
    named = BF16.with_kernels("product_kernel")
    assert explain(lambda x: big(x @ x), x, policy=named).totals.wide_kernel_flops == 0


def test_what_an_author_says_of_a_kernel_counts():
    def kernel(x, o):
        o[...] = x[...]

    def fn(x):
        shape, cost = jax.ShapeDtypeStruct(x.shape, x.dtype), pl.CostEstimate(2**20, 0, 0)
        return pl.pallas_call(kernel, shape, interpret=True, cost_estimate=cost)(x)

    assert explain(fn, X, policy=BF16).totals.wide_kernel_flops == 2**20
    # Its results may be the second argument, and not by name.
    (found,) = kernels(fn, BF16.with_kernels(f"{__name__}.*"), X)
    assert found == ("bfloat16",) * 2


def test_float16():
    assert kernels(layer, FP16.with_kernels("toy_attention"), W, X) == [("float16",) * 3]
