"""Derivatives as other projects' own tests take them: numbers, refs, other interpreters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jmp_autocast import autocast, keep_less
from tests.support.jaxprs import assert_dots_run_in, find, trace

X = np.linspace(-0.7, 0.7, 64, dtype=np.float32).reshape(8, 8)
bf16 = functools.partial(autocast, policy=jnp.bfloat16)


@jax.custom_vjp
def squared(x):
    return jnp.sum((x * X) @ X) * x


squared.defvjp(lambda x: (squared(x), x), lambda x, ct: (2 * ct * x * jnp.sum(X @ X),))


@jax.custom_jvp
def cubed(x):
    return jnp.sum((x * X) @ X) * x**2


@cubed.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return cubed(x), 3 * x**2 * t * jnp.sum(X @ X)


def test_python_numbers_reach_rebuilt_rules():
    """`jax.vjp` and `jax.jvp` take numbers for tangents and cotangents, and hand them on."""
    _, vjp = jax.vjp(bf16(squared), jnp.float32(2.0))
    np.testing.assert_allclose(vjp(1.0)[0], jax.grad(squared)(2.0), rtol=0.02)
    expected = jax.jvp(cubed, (2.0,), (1.0,))
    for fn in (bf16(cubed), jax.jit(bf16(cubed))):
        for primal, tangent in ((2.0, 1.0), (jnp.float32(2.0), 1.0), (2.0, jnp.float32(1.0))):
            found = jax.jvp(fn, (primal,), (tangent,))
            np.testing.assert_allclose(found, expected, rtol=0.02)
            assert {x.dtype for x in found} == {jnp.dtype("float32")}
    np.testing.assert_allclose(jax.jacfwd(bf16(cubed))(2.0), expected[1], rtol=0.02)
    np.testing.assert_allclose(jax.linearize(bf16(cubed), 2.0)[1](1.0), expected[1], rtol=0.02)


def test_a_residual_that_is_a_ref():
    """JAX's recipe for taking gradients out of the backward pass."""

    @jax.custom_vjp
    def stash(ref, x):
        return x

    def backward(ref, ct):
        ref[...] = ct
        return None, ct

    stash.defvjp(lambda ref, x: (x, ref), backward)

    def loss(fn, w, x):
        ref = jax.new_ref(jnp.zeros((8, 8)))
        grads = jax.grad(lambda w: fn(ref, w, x))(w)
        return grads, ref[...]

    def fn(ref, w, x):
        return jnp.sum(jnp.sin(stash(ref, x @ w)))

    found = jax.jit(functools.partial(loss, bf16(fn, params=1)))(X, X)
    expected = jax.jit(functools.partial(loss, fn))(X, X)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.03)
        assert one.any()


def test_a_barrier_with_a_ref_among_its_operands():
    def fn(x):
        ref = jax.new_ref(x)
        _, y = lax.optimization_barrier((ref, x @ x))
        return ref[...] + y

    # JAX runs such a program from 0.12 on; 0.10 traces it.
    assert_dots_run_in("bfloat16", trace(bf16(fn), X))


def test_the_gradient_of_an_unreduced_product():
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        a = jax.device_put(X, NamedSharding(mesh, PartitionSpec(None, "x")))
        b = jax.device_put(X, NamedSharding(mesh, PartitionSpec("x", None)))
        unreduced = PartitionSpec(None, None, unreduced={"x"})

        def loss(a, b):
            product = jnp.einsum("ij,jk->ik", a, b, out_sharding=unreduced)
            return jnp.sum(jnp.sin(jax.reshard(product, PartitionSpec(None, None))))

        found = jax.jit(jax.grad(bf16(loss, params=(0, 1)), (0, 1)))(a, b)
        expected = jax.jit(jax.grad(loss, (0, 1)))(a, b)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.03)


def test_errors_name_the_users_function_and_argument():
    def users_function(params, batch):
        return params["w"] if batch > 0 else batch

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        bf16(users_function)({"w": X}, jnp.float32(1))
    message = str(caught.value)
    assert f"users_function at {__file__}" in message
    assert "argument batch" in message


def test_a_loop_that_starts_from_a_number_is_no_reason_for_16_bits():
    """`sin(s) + 0.01` from 1.0 was 2 % off after 100 steps, with no matmul in the program."""

    def wave(start):
        return lax.scan(lambda s, _: (jnp.sin(s) + 0.01, s), start, None, length=100)[1]

    np.testing.assert_array_equal(bf16(lambda: wave(1.0))(), wave(1.0))
    assert not find(trace(bf16(lambda: wave(1.0))), "convert_element_type")


@pytest.mark.parametrize("around", [autocast, keep_less])
def test_the_gradient_by_a_number_is_weakly_typed_as_in_the_plain_program(around):
    def loss(x):
        return jax.scipy.special.gammaln(jnp.abs(x) + 1)

    found, plain = (jax.make_jaxpr(jax.grad(f))(0.5).out_avals[0] for f in (around(loss), loss))
    assert plain.weak_type
    assert found.weak_type


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))


def batched(f):
    return lambda x, w: jax.vmap(f, (0, None))(x[None], w)[0]


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, batched, jax.disable_jit()])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_rule_in_a_shard_map_runs_without_jit(is_inside, around):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec("i"), PartitionSpec()), "out_specs": PartitionSpec("i")}
    sharded = lambda f: jax.shard_map(f, mesh=mesh, check_vma=False, **specs)
    body = lambda x, w: clipped(x @ w) * 3
    fn = sharded(bf16(body)) if is_inside else bf16(sharded(body))
    out = around(fn)(jnp.ones((4, 8)), jnp.eye(8))
    np.testing.assert_array_equal(out, 3 * np.ones((4, 8)))
