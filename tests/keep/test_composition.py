"""A function that keeps less has the values and derivatives of the function, in every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jmp_autocast import LossScale, finite_value_and_grad, keep_less
from tests.support.numerics import relative_error

from .programs import PROGRAMS, WEIGHTS, X, small

SCALES = WEIGHTS["scale"]

# With the checker of leaks, the plain program fails under `shard_map` as well (JAX 0.10.2).
pytestmark = pytest.mark.usefixtures("jit_caches")


def of_scales(f):
    return lambda scale, x: f({**WEIGHTS, "scale": scale}, x)


def sharded(f):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    specs = PartitionSpec(), PartitionSpec("data")

    def on_each(w, x):
        return jax.lax.pmean(f(w, x), "data")

    return jax.grad(jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))


def through_scan(f):
    def step(total, x):
        return total + f(WEIGHTS, x), None

    return lambda w, x: jax.grad(lambda x: jax.lax.scan(step, 0.0, jnp.stack([x, x]))[0])(x)


TRANSFORMS = {
    "value": lambda f: f,
    "grad": jax.grad,
    "value_and_grad": lambda f: jax.value_and_grad(f, argnums=(0, 1)),
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](1.0),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "vmap of grad": lambda f: lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, jnp.stack([x, -x])),
    "grad of vmap": lambda f: jax.grad(
        lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, -x])).sum()
    ),
    "hessian": lambda f: lambda w, x: jax.hessian(of_scales(f))(SCALES, x),
    "reverse over reverse": lambda f: jax.grad(
        lambda w, x: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(w, x)))
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "checkpoint with a policy": lambda f: jax.grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "scan": through_scan,
    "cond": lambda f: jax.grad(lambda w, x: jax.lax.cond(x[0, 0] > 0, f, f, w, x)),
    "shard_map": sharded,
    "twice": lambda f: jax.grad(keep_less(f)),
    "loss scaling": lambda f: (
        lambda w, x: finite_value_and_grad(f)(LossScale.static(1024.0), w, x).grads
    ),
}


def check(transform, f, planned, tolerance=1e-6):
    expected, found = (jax.jit(transform(g))(WEIGHTS, X) for g in (f, planned))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        assert relative_error(a, b) < tolerance


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    check(TRANSFORMS[name], small, keep_less(small))


@pytest.mark.parametrize("residuals", ["auto", 0.5])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, residuals):
    check(jax.value_and_grad, PROGRAMS[name], keep_less(PROGRAMS[name], residuals=residuals))
