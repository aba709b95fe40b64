"""Tangents and cotangents known to be zero stay so in derivative rules of the user's own."""

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jmp_autocast import autocast

from .test_custom_rules import check, w, x


def test_custom_jvp_sees_symbolic_zeros():
    seen = []

    @jax.custom_jvp
    def f(x, w, b):
        return jnp.sin(x @ w) + b

    def rule(primals, tangents):
        x, w, b = primals
        seen.append([type(t) is SymbolicZero for t in tangents])
        assert all(t.dtype == p.dtype for t, p in zip(tangents, primals, strict=True))
        return jnp.sin(x @ w) + b, 3 * jnp.cos(x @ w) * (x @ tangents[1])

    f.defjvp(rule, symbolic_zeros=True)
    loss = lambda w, x: jnp.mean(f(x, w, jnp.ones(8)) ** 2)
    check(lambda cast: jax.grad(cast(loss)), w(), x())
    assert len(seen) >= 2  # of the plain program and of the other
    assert all(zeros == [True, False, True] for zeros in seen)


def test_custom_vjp_sees_what_is_perturbed():
    """And which cotangents are zero."""
    perturbed, zeros = [], []

    @jax.custom_vjp
    def f(x, w):
        return jnp.sin(x @ w), x @ w

    def forward(x, w):
        perturbed.append((x.perturbed, w.perturbed))
        x, w = x.value, w.value
        return f(x, w), (x, w)

    def backward(saved, cotangents):
        x, w = saved
        zeros.append([type(c) is SymbolicZero for c in cotangents])
        g = 3 * cotangents[0] * jnp.cos(x @ w)
        return None, x.T @ g

    f.defvjp(forward, backward, symbolic_zeros=True)
    loss = lambda w, x: jnp.mean(f(x, w)[0] ** 2)
    check(lambda cast: jax.grad(cast(loss)), w(), x())
    assert set(perturbed) == {(False, True)}
    known = jax.__version_info__ >= (0, 10, 2)  # JAX 0.10.0 has no way to say so
    zeros.clear()
    jax.make_jaxpr(jax.grad(autocast(loss)))(w(), x())
    assert {tuple(z) for z in zeros} == {(False, known)}


def test_custom_vjp_with_an_output_that_a_batch_shares():
    """diffrax has such rules; a cotangent for that output would be an error of JAX 0.12."""

    @jax.custom_vjp
    def f(x, w, t):
        return jnp.sin(x @ w), 2 * t

    f.defvjp(
        lambda x, w, t: (f(x, w, t), (x, w, t)),
        lambda saved, g: (
            g[0] @ saved[1].T,
            jnp.outer(saved[0], 3 * g[0] * jnp.cos(saved[0] @ saved[1])),
            2 * g[1] + jnp.sum(g[0]),  # of each example its own
        ),
    )

    def loss(w, x):
        return jnp.mean(jax.vmap(lambda row: f(row, w, jnp.sum(w))[0])(x) ** 2)

    check(lambda cast: jax.grad(cast(loss)), w(), x())
