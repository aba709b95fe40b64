"""autocast is a peer of JAX's transforms: inside out and outside in, forward and backward."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jmp_autocast import autocast, keep_less
from jmp_autocast.interpreters.primitives.reading import reduction_depth
from tests.support.jaxprs import assert_dots_run_in, find
from tests.support.numerics import assert_trees_close, draw

DTYPES = ["bfloat16", "float16"]
TOLERANCE = {"bfloat16": 4e-2, "float16": 5e-3}  # relative to the largest element
DEVICES = 8
SAVE_NAMES = jax.checkpoint_policies.save_only_these_names("hidden")


def params():
    return {"w": draw(0, 8, 8) / 3, "b": draw(1, 8) / 4}


def inputs():
    return draw(2, DEVICES, 8)


def layer(params, x):
    hidden = checkpoint_name(x @ params["w"] + params["b"], "hidden")
    return jnp.tanh(hidden) @ params["w"]


def loss(params, x):
    return jnp.mean(layer(params, x) ** 2)


def jvp(f):
    return lambda *args: jax.jvp(f, args, jax.tree.map(jnp.cos, args))


def vjp(f):
    def pulled(*args):
        out, pull = jax.vjp(f, *args)
        return out, pull(jax.tree.map(jnp.cos, out))

    return pulled


def linearize(f):
    def pushed(*args):
        out, push = jax.linearize(f, *args)
        return out, push(*jax.tree.map(jnp.cos, args))

    return pushed


def mesh():
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def shard_map(f):
    return lambda p, x: jax.shard_map(
        f, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P("data")
    )(p, x)


def shard_map_mean(f):
    return lambda p, x: jax.shard_map(
        lambda p, x: lax.pmean(f(p, x), "data"),
        mesh=mesh(),
        in_specs=(P(), P("data")),
        out_specs=P(),
    )(p, x)


def pmap(f):
    return jax.pmap(f, in_axes=(None, 0))


def pmap_mean(f):
    return jax.pmap(lambda p, x: lax.pmean(f(p, x), "i"), axis_name="i", in_axes=(None, 0))


def scan(f):
    return lambda p, x: lax.scan(lambda h, _: (f(p, h), jnp.sum(h)), x, None, length=3)


def scan_over_weights(f):
    def scanned(p, x):
        stacked = jax.tree.map(lambda v: jnp.stack([v, -v]), p)
        return lax.scan(lambda h, p: (f(p, h), None), x, stacked)[0]

    return scanned


def while_loop(f):
    body = lambda p: lambda carry: (carry[0] + 1, f(p, carry[1]))
    return lambda p, x: lax.while_loop(lambda c: c[0] < 3, body(p), (0, x))[1]


def fori_loop(f):
    return lambda p, x: lax.fori_loop(0, 3, lambda _, h: f(p, h), x)


def cond(f):
    return lambda p, x: lax.cond(jnp.sum(x) > 0, f, lambda p, x: f(p, 2 * x), p, x)


def switch(f):
    branches = [lambda p, x: x, lambda p, x: f(p, f(p, x)), lambda p, x: -f(p, x)]
    return lambda p, x: lax.switch(jnp.where(jnp.sum(x) > 0, 1, 2), branches, p, x)


def custom_jvp(f):
    g = jax.custom_jvp(f)

    @g.defjvp
    def rule(primals, tangents):
        out, tangent = jax.jvp(f, primals, tangents)
        return out, 3 * tangent  # not the true derivative: shows that the rule is in force

    return g


def custom_vjp(f):
    g = jax.custom_vjp(f)

    def forward(*args):
        return jax.vjp(f, *args)

    def backward(pull, cotangent):
        return pull(3 * cotangent)

    g.defvjp(forward, backward)
    return g


def custom_vmap(f):
    g = jax.custom_batching.custom_vmap(f)
    g.def_vmap(lambda size, batched, p, x: (3 * jax.vmap(f, (None, 0))(p, x), True))
    return lambda p, x: jax.vmap(g, (None, 0))(p, x)


def remat(policy):
    return functools.partial(jax.checkpoint, policy=policy)


# Transform, the function it is applied to, and what exercises its backward pass: vjp, or jvp
# where reverse mode has none, or nothing where the transform is a derivative itself.
TRANSFORMS = {
    "jit": (jax.jit, layer, vjp),
    "grad": (jax.grad, loss, None),
    "grad_of_grad": (lambda f: jax.grad(lambda p, x: jnp.sum(jax.grad(f, 1)(p, x))), loss, None),
    "value_and_grad": (jax.value_and_grad, loss, None),
    "jvp": (jvp, layer, vjp),
    "vjp": (vjp, layer, None),
    "linearize": (linearize, layer, None),
    "hessian": (jax.hessian, loss, None),
    "jacfwd": (jax.jacfwd, layer, None),
    "jacrev": (jax.jacrev, layer, None),
    "vmap": (lambda f: jax.vmap(f, (None, 0)), layer, vjp),
    "vmap_of_grad": (lambda f: jax.vmap(jax.grad(f), (None, 0)), loss, None),
    "vmap_over_weights": (
        lambda f: lambda p, x: jax.vmap(f, (0, None))(jax.tree.map(lambda v: v[None], p), x),
        layer,
        vjp,
    ),
    "pmap": (pmap, layer, vjp),
    "pmap_of_mean": (pmap_mean, loss, vjp),
    "shard_map": (shard_map, layer, vjp),
    "shard_map_of_mean": (shard_map_mean, loss, vjp),
    "checkpoint": (jax.checkpoint, layer, vjp),
    "checkpoint_dots": (remat(jax.checkpoint_policies.dots_saveable), layer, vjp),
    "checkpoint_everything": (remat(jax.checkpoint_policies.everything_saveable), layer, vjp),
    "checkpoint_names": (remat(SAVE_NAMES), layer, vjp),
    "scan": (scan, layer, vjp),
    "scan_over_weights": (scan_over_weights, layer, vjp),
    "while_loop": (while_loop, layer, jvp),
    "fori_loop": (fori_loop, layer, vjp),
    "cond": (cond, layer, vjp),
    "switch": (switch, layer, vjp),
    "custom_jvp": (custom_jvp, layer, vjp),
    "custom_vjp": (custom_vjp, layer, vjp),
    "custom_vmap": (custom_vmap, layer, None),
}

# A derivative rounds at more places.
LOOSER = {"hessian": 2, "grad_of_grad": 2, "jvp": 2, "scan": 2, "fori_loop": 2}

# JAX itself leaks a tracer when it differentiates psum in a shard_map, with no autocast around.
LEAKS_IN_JAX = ("shard_map_of_mean", "pmap_of_mean")

ORDERS = {
    "autocast_outside": lambda cast, transform, f: cast(transform(f)),
    "autocast_inside": lambda cast, transform, f: transform(cast(f)),
}


def traced(name, order, dtype):
    """The transform, with autocast and with its derivative, traced by jit."""
    transform, f, derivative = TRANSFORMS[name]
    cast = functools.partial(autocast, policy=dtype) if dtype else lambda f: f
    fn = ORDERS[order](cast, transform, f)
    with jax.check_tracer_leaks(name not in LEAKS_IN_JAX):
        return jax.jit(derivative(fn) if derivative else fn).trace(params(), inputs())


def compiled(traced):
    # Most of the time of these tests is LLVM's.
    return traced.lower().compile({"xla_backend_optimization_level": 0})


@functools.cache
def reference(name):
    """The type of the plain program and its values."""
    plain = traced(name, "autocast_outside", None)
    return plain.out_info, compiled(plain)(params(), inputs())


@pytest.mark.parametrize(("order", "dtype"), [*zip(ORDERS, DTYPES, strict=True)])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_types_dots_and_values(name, order, dtype):
    """The corpus holds the dtypes in the other order with the other dtype."""
    found, (out_info, expected) = traced(name, order, dtype), reference(name)
    assert found.out_info == out_info
    # The gradient of one example is an outer product: it sums nothing, and is as precise as what
    # it multiplies.
    dots = [eqn for eqn in find(found.jaxpr, "dot_general") if reduction_depth(eqn) > 1]
    assert {v.aval.dtype.name for eqn in dots for v in eqn.invars} == {dtype}
    if name != "vmap_of_grad":
        assert_dots_run_in(dtype, found.jaxpr)
    values = compiled(found)(params(), inputs())
    assert_trees_close(values, expected, LOOSER.get(name, 1) * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_linear_transpose(order, dtype):
    """Linear in x: transposed itself, not by way of a jvp."""
    weights, cotangent = params(), inputs()
    linear = lambda x: 2 * (x @ weights["w"]) + x[::-1]
    transpose = lambda f: lambda ct: jax.linear_transpose(f, inputs())(ct)
    fn = ORDERS[order](functools.partial(autocast, policy=dtype), transpose, linear)
    found = jax.jit(fn).trace(cotangent)
    assert_dots_run_in(dtype, found.jaxpr)
    assert found.out_info == jax.eval_shape(transpose(linear), cotangent)
    expected = jax.jit(transpose(linear))(cotangent)
    assert_trees_close(compiled(found)(cotangent), expected, TOLERANCE[dtype])


def test_autocast_of_an_exported_program():
    """It is compiled already: nothing inside is cast, and it gets what it was exported for."""
    exported = jax.export.export(jax.jit(layer))(params(), inputs())
    program = lambda p, x: exported.call(p, x @ p["w"])
    found = jax.jit(autocast(program, jnp.bfloat16)).trace(params(), inputs())
    assert_dots_run_in("bfloat16", found.jaxpr)
    value = compiled(found)(params(), inputs())
    assert_trees_close(value, jax.jit(program)(params(), inputs()), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_gradient_of_a_weak_scalar_is_weak(order, in_loop):
    def f(t):
        once = lambda total, _: (total, jnp.ones((8, 8)) @ jnp.diag(jnp.ones(8) * t))
        return jnp.sum(lax.scan(once, 0.0, None, length=2)[1] if in_loop else once(0.0, None)[1])

    found = jax.eval_shape(ORDERS[order](autocast, jax.grad, f), 0.5)
    assert found == jax.eval_shape(jax.grad(f), 0.5)
    assert found.weak_type


LITERALS = {
    "float": lambda: jnp.zeros(()),
    "weak": lambda: jnp.asarray(1.0),
    "integer": lambda: jnp.int32(3),
    "bool": lambda: jnp.asarray(True),
    "moved": lambda: lax.stop_gradient(jnp.zeros(())),
}


@pytest.mark.parametrize("around", [autocast, keep_less, jax.jit])
@pytest.mark.parametrize("transform", [autocast, keep_less])
@pytest.mark.parametrize("literal", LITERALS.values(), ids=LITERALS)
def test_an_array_that_is_a_literal_of_the_jaxpr_is_returned_as_an_array(
    literal, transform, around
):
    """`jnp.asarray(1.0)` came out as a Python float, which has no dtype."""
    found = around(lambda x: (transform(lambda x: (x @ x, literal()))(x)[1], x))(jnp.ones((8, 8)))
    assert isinstance(found[0], jax.Array)
    assert jax.typeof(found[0]) == jax.typeof(literal())
    inside = []
    jax.grad(lambda x: inside.append(transform(lambda x: literal())(x)) or jnp.sum(x))(1.0)
    assert isinstance(inside[0], jax.Array)
    assert transform(lambda x: (x, 1.0))(jnp.ones(2))[1] == 1.0
    assert isinstance(transform(lambda x: (x, 1.0))(jnp.ones(2))[1], float)
