"""No structural primitive leaves a float32 dot behind, and none loses what it is for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import call_p, closed_call_p
from jax.sharding import PartitionSpec as P

from jmp_autocast import autocast
from jmp_autocast.interpreters.compat import bind
from tests.corpus.jaxpr_text import jaxpr_text
from tests.support.jaxprs import assert_dots_run_in, dot_dtypes, find, trace
from tests.support.numerics import assert_trees_close, draw
from tests.support.own_rules import in_custom_jvp, in_custom_vjp, in_custom_vmap


def params():
    return {"w": draw(0, 8, 8) / 3, "b": draw(1, 8) / 4}


def inputs():
    return draw(2, 6, 8)


def layer(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def in_scan(f):
    return lambda p, x: lax.scan(lambda h, _: (f(p, h), None), x, None, length=3)[0]


def in_fori(f):
    return lambda p, x: lax.fori_loop(0, 3, lambda i, h: f(p, h), x)


def in_while(f):
    keep_on = lambda c: (c[0] < 3) & (jnp.sum(c[1] @ c[1].T) < 1e6)
    return lambda p, x: lax.while_loop(keep_on, lambda c: (c[0] + 1, f(p, c[1])), (0, x))[1]


def in_cond(f):
    return lambda p, x: lax.cond(jnp.sum(x) > 0, f, lambda p, x: f(p, -x), p, x)


def in_switch(f):
    branches = [f, lambda p, x: f(p, f(p, x)), lambda p, x: f(p, 2 * x)]
    return lambda p, x: lax.switch(jnp.argmax(x[0]), branches, p, x)


def in_vmapped_custom_vmap(f):
    g = in_custom_vmap(f)
    return lambda p, x: jax.vmap(g, (None, 0))(p, x)


def in_shard_map(f):
    here = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return lambda p, x: jax.shard_map(f, mesh=here, in_specs=(P(), P("i")), out_specs=P("i"))(p, x)


def in_call(primitive):
    def wrap(f):
        def call(p, x):
            leaves, tree = jax.tree.flatten((p, x))
            closed = jax.make_jaxpr(lambda *xs: f(*jax.tree.unflatten(tree, xs)))(*leaves)
            called = closed if primitive is closed_call_p else closed.jaxpr
            return bind(primitive, leaves, {"call_jaxpr": called})[0]

        return call

    return wrap


in_remat = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
in_jit = jax.jit
in_named_call = functools.partial(jax.named_call, name="part")

# Wrapper, and the primitive that must still be there (JAX has renamed some), if one must.
STRUCTURES = {
    "jit": (in_jit, {"jit"}),
    "named_call": (in_named_call, set()),
    "closed_call": (in_call(closed_call_p), {"closed_call", "eval_jaxpr"}),
    "call": (in_call(call_p), {"call", "core_call", "eval_jaxpr"}),
    "remat": (in_remat, {"remat2", "remat_opt", "checkpoint"}),
    "scan": (in_scan, {"scan"}),
    "fori": (in_fori, {"scan"}),
    "while": (in_while, {"while"}),
    "cond": (in_cond, {"cond"}),
    "switch": (in_switch, {"cond"}),
    "custom_jvp": (in_custom_jvp, {"custom_jvp_call"}),
    "custom_vjp": (in_custom_vjp, {"custom_vjp_call"}),
    "custom_vmap": (in_custom_vmap, {"custom_vmap_call"}),
    "vmapped_custom_vmap": (in_vmapped_custom_vmap, set()),
    "shard_map": (in_shard_map, {"shard_map"}),
}


def compose(*names):
    """The layer inside the structures, the first one outermost."""
    fn = layer
    for name in reversed(names):
        fn = STRUCTURES[name][0](fn)
    return fn


def forward_derivative(fn):
    return lambda p, x: jax.jvp(fn, (p, x), (p, x))


def backward_derivative(fn):
    def pulled(p, x):
        out, pull = jax.vjp(fn, p, x)
        return out, pull(jnp.cos(out))

    return pulled


FORWARD_ONLY = {"while"}  # a trip count that depends on data
REVERSE_ONLY = {"custom_vjp"}


def derivatives(*names):
    if "custom_vmap" in names:  # JAX cannot differentiate it where it is not batched
        return []
    found = [] if FORWARD_ONLY & set(names) else [backward_derivative]
    return found if REVERSE_ONLY & set(names) else [*found, forward_derivative]


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name):
    """No float32 dot is inside, they are still there, and a second `autocast` changes nothing."""
    plain, kept = compose(name), STRUCTURES[name][1]
    once = autocast(plain, "bfloat16")
    fns = plain, once, autocast(once, "bfloat16")
    for derivative in [lambda f: f, *derivatives(name)]:
        declared, found, twice = (trace(derivative(f), params(), inputs()) for f in fns)
        assert_dots_run_in("bfloat16", found)
        assert found.out_avals == declared.out_avals
        assert len(find(found, "dot_general")) == len(find(declared, "dot_general"))
        # JAX 0.10.0 prints a rule of a `custom_vmap` with its address.
        assert jaxpr_text(twice) == jaxpr_text(found)
    declared, found = (find(trace(f, params(), inputs()), *kept) for f in fns[:2])
    assert [e.primitive for e in found] == [e.primitive for e in declared]
    assert len(declared) == bool(kept)


NESTED = [
    ("scan", "remat", "jit", "cond"),
    ("custom_jvp", "scan", "cond"),
    ("remat", "custom_vjp", "scan"),
    ("custom_vjp", "custom_jvp", "jit"),
    ("while", "cond", "scan"),
    ("shard_map", "scan", "remat"),
    ("cond", "jit", "remat", "scan"),
    ("jit", "jit", "scan", "scan"),
    ("scan", "custom_vjp", "remat"),
    ("scan", "custom_jvp", "jit"),
    ("switch", "fori", "remat"),
    ("while", "while"),
    ("scan", "vmapped_custom_vmap", "jit"),
    ("remat", "shard_map", "cond"),
    ("jit", "shard_map", "jit"),
    ("closed_call", "remat", "call"),
    ("remat", "remat", "jit"),
]


@pytest.mark.parametrize("names", NESTED, ids="-".join)
def test_nested_structures(names):
    plain = compose(*names)
    derivative = (derivatives(*names) or [lambda f: f])[0]
    fns = derivative(autocast(plain, jnp.float16)), derivative(plain)
    found, expected = (jax.jit(fn).trace(params(), inputs()) for fn in fns)
    assert_dots_run_in("float16", found.jaxpr)
    assert found.out_info == expected.out_info
    if names in NESTED[:6]:
        # Most of the time of these tests is LLVM's.
        options = {"xla_backend_optimization_level": 0}
        values = (t.lower().compile(options)(params(), inputs()) for t in (found, expected))
        assert_trees_close(*values, 1e-2)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"policy": "float16"}, "float16"), ({"enabled": False}, "float32")],
    ids=["float16", "disabled"],
)
@pytest.mark.parametrize("name", STRUCTURES)
def test_an_inner_autocast_reads_what_the_outer_one_made_low(name, options, dtype):
    def first_and_structure(transform):
        inner = transform(compose(name))
        return lambda p, x: inner(p, x @ p["w"])

    plain = first_and_structure(lambda f: f)
    fn = autocast(first_and_structure(lambda f: autocast(f, **options)), "bfloat16")
    for derivative in [lambda f: f, *derivatives(name)[:1]]:
        found = trace(derivative(fn), params(), inputs())
        assert {dot[:2] for dot in dot_dtypes(found)} == {("bfloat16",) * 2, (dtype,) * 2}
    expected = plain(params(), inputs())
    np.testing.assert_allclose(fn(params(), inputs()), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("is_product", [True, False])
def test_branches_that_disagree_return_one_type(is_product):
    # A product returns 16 bits and an exponential float32. XLA refuses that, and tracing does not.
    plain = lambda p, x: lax.cond(is_product, lambda x: x @ p["w"], jnp.exp, x)
    fn = jax.jit(autocast(plain, "bfloat16", output_dtype="computed"))
    found, expected = fn(params(), inputs()), plain(params(), inputs())
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)
