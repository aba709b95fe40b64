"""Promises that hold for every program, tried on random ones."""

import collections

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast
from tests.support.jaxprs import find, trace
from tests.support.random_programs import arguments, as_float32, as_function, programs

COMPUTE_DTYPES = st.sampled_from(["float16", "bfloat16"])
FLOATS = ("float32", "float16", "bfloat16")
IN_DOMAIN = frozenset(FLOATS)


def examples(n):
    return hypothesis.settings(
        max_examples=n,
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.too_slow,
        ],
    )


@examples(400)
@hypothesis.given(programs(), arguments(), COMPUTE_DTYPES)
def test_output_types_are_the_plain_programs(jit_caches, program, args, dtype):
    """Dtypes, weak types, shapes and tree structure."""
    fn = as_function(program)
    assert jax.eval_shape(autocast(fn, compute_dtype=dtype), *args) == jax.eval_shape(fn, *args)


@examples(15)
@hypothesis.given(programs(size=4), arguments(), COMPUTE_DTYPES)
def test_no_tracer_leaks(program, args, dtype):
    fn = as_function(program)
    assert jax.eval_shape(autocast(fn, compute_dtype=dtype), *args) == jax.eval_shape(fn, *args)


@examples(40)
@hypothesis.given(programs(), arguments(), COMPUTE_DTYPES)
def test_idempotent(jit_caches, program, args, dtype):
    once = autocast(as_function(program), compute_dtype=dtype)
    twice = autocast(once, compute_dtype=dtype)
    assert str(trace(twice, *args)) == str(trace(once, *args))


@examples(40)
@hypothesis.given(programs(), arguments(), COMPUTE_DTYPES)
def test_deterministic(jit_caches, program, args, dtype):
    fn = as_function(program)
    first, second = (str(trace(autocast(fn, compute_dtype=dtype), *args)) for _ in range(2))
    assert first == second


@examples(40)
@hypothesis.given(programs(), arguments())
def test_disabled_changes_nothing(jit_caches, program, args):
    fn = as_function(program)
    assert str(trace(autocast(fn, enabled=False), *args)) == str(trace(fn, *args))


def loss_of(program):
    def loss(*args):
        outputs = [x for x in jax.tree.leaves(as_function(program)(*args)) if hasattr(x, "dtype")]
        return sum(jnp.sum(as_float32(x)) for x in outputs)

    return loss


@examples(80)
@hypothesis.given(programs(exclude={"while"}), arguments(dtypes=FLOATS, weak=False), COMPUTE_DTYPES)
def test_gradients_have_the_parameters_types(jit_caches, program, args, dtype):
    loss = loss_of(program)
    argnums = (0, 1, 2)
    inside = jax.grad(autocast(loss, compute_dtype=dtype), argnums)
    outside = autocast(jax.grad(loss, argnums), compute_dtype=dtype)
    expected = jax.eval_shape(jax.grad(loss, argnums), *args)
    assert jax.eval_shape(inside, *args) == expected
    assert jax.eval_shape(outside, *args) == expected


def foreign_casts(jaxpr):
    """Casts from or to a dtype that autocast never touches; a float32 or 16-bit end is "float"."""
    counts = collections.Counter()
    for eqn in find(jaxpr, "convert_element_type"):
        ends = [atom.aval.dtype.name for atom in (*eqn.invars, *eqn.outvars)]
        ends = ["float" if end in IN_DOMAIN else end for end in ends]
        # A number cast to float may be cast to two of them.
        if ends != ["float", "float"] and not (ends[0] in ("bool", "int32") and "float" in ends):
            counts[tuple(ends)] += 1
    return counts


@examples(100)
@hypothesis.given(
    programs(exclude={"inner_autocast"}),
    arguments(
        dtypes=("float32", "float64", "complex64", "complex128", "int32", "bool"), weak=False
    ),
    COMPUTE_DTYPES,
)
def test_nothing_else_is_cast(jit_caches, program, args, dtype):
    """float64, complex, integers and bools pass through."""
    fn = as_function(program)
    with jax.enable_x64(True):
        plain, cast = trace(fn, *args), trace(autocast(fn, compute_dtype=dtype), *args)
    assert foreign_casts(cast) == foreign_casts(plain)


@pytest.mark.parametrize("extremum", [jnp.maximum, jnp.minimum])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_extrema_of_complex_numbers_pass_through(extremum, dtype):
    """Beside the random programs, which are differentiated: JAX 0.12 has no derivative of these."""
    x = np.complex64([1 + 2j, 3 - 1j])
    fn = lambda x: extremum(x, 1j * x)
    assert find(trace(autocast(fn, compute_dtype=dtype), x), "convert_element_type") == []
    np.testing.assert_array_equal(autocast(fn, compute_dtype=dtype)(x), fn(x))


LOWEST = float(np.finfo(np.float32).min)

# Bounded inputs give bounded results, and no operation enlarges a rounding error.
SMOOTH = {
    "tanh": lambda x, y, mask: jnp.tanh(x),
    "average": lambda x, y, mask: (x + y) / 2,
    "product": lambda x, y, mask: jnp.sin(x) * jnp.cos(y),
    "matmul": lambda x, y, mask: x @ y / 3,
    "dot_of_transposed": lambda x, y, mask: jnp.einsum("ij,kj->ik", x, y) / 3,
    "attention": lambda x, y, mask: jax.nn.softmax(jnp.where(mask, x @ y, LOWEST)) @ y,
    "mean": lambda x, y, mask: x - jnp.mean(x, -1, keepdims=True) / 2,
    "gauss": lambda x, y, mask: jnp.exp(-(x**2)),
    "log": lambda x, y, mask: jnp.log1p(y**2),
    "log_of_small": lambda x, y, mask: jnp.log(1e-8 + y**2 + 1) / 2,
    "norm": lambda x, y, mask: x / (1 + jnp.linalg.norm(y)),
    "rsqrt": lambda x, y, mask: x * lax.rsqrt(y**2 + 1),
    "sigmoid": lambda x, y, mask: jax.nn.sigmoid(x) * jnp.tanh(y),
    "silu": lambda x, y, mask: jax.nn.silu(x) / 2,
    "where": lambda x, y, mask: jnp.where(mask, x, y),
    "concatenate": lambda x, y, mask: jnp.concatenate([x, y])[2:5],
    "transpose": lambda x, y, mask: x.T,
    "gather": lambda x, y, mask: x[jnp.array([2, 0, 2])],
    "scatter": lambda x, y, mask: x.at[1].set(y[0]),
    "scatter_add": lambda x, y, mask: (x / 3).at[jnp.array([0, 0])].add(y[:2] / 3),
    "cumsum": lambda x, y, mask: jnp.cumsum(x, 0) / 3,
    "sort": lambda x, y, mask: jnp.sort(x, 0),
    "max": lambda x, y, mask: x - jnp.max(y, 0),
    "clip": lambda x, y, mask: jnp.clip(x, -0.5, 0.5),
    "float16": lambda x, y, mask: x.astype(jnp.float16).astype(jnp.float32),
    "bfloat16": lambda x, y, mask: jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32),
    "one_hot": lambda x, y, mask: jax.nn.one_hot(jnp.array([1, 0, 2]), 3) @ x,
    "inverse": lambda x, y, mask: jnp.linalg.inv(jnp.eye(3) * 4 + x) @ y,
    "weak": lambda x, y, mask: 0.5 * x + 0.25,
}
AROUND = {
    "nothing": lambda f, mask: f,
    "jit": lambda f, mask: jax.jit(f),
    "remat": lambda f, mask: jax.checkpoint(f),
    "scan": lambda f, mask: lambda x, y: lax.scan(lambda h, _: (f(h, y), h), x, None, 2)[0],
    "cond": lambda f, mask: lambda x, y: lax.cond(mask[0, 0], f, lambda x, y: x, x, y),
}
smooth_steps = st.tuples(
    st.sampled_from(sorted(AROUND)),
    st.lists(st.sampled_from(sorted(SMOOTH)), min_size=1, max_size=4).map(tuple),
)


def smooth(program, params, x, mask):
    y = params["w"]
    for around, names in program:

        def body(x, y, names=names):
            for name in names:
                x = SMOOTH[name](x, y, mask)
            return x

        x, y = AROUND[around](body, mask)(x, y), x
    return x


@examples(15)
@hypothesis.given(
    st.lists(smooth_steps, min_size=1, max_size=3), st.integers(0, 99), COMPUTE_DTYPES
)
def test_values_are_close(jit_caches, program, seed, dtype):
    """Run operation by operation: XLA keeps no excess precision between them."""
    random = np.random.default_rng(seed)
    draw = lambda: jnp.asarray(random.uniform(-1, 1, (3, 3)), jnp.float32)
    params, x, mask = {"w": draw()}, draw(), random.random((3, 3)) < 0.5
    fn = lambda params, x: smooth(program, params, x, mask)
    expected, found = fn(params, x), autocast(fn, compute_dtype=dtype)(params, x)
    assert np.all(np.isfinite(expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.1 if dtype == "bfloat16" else 0.015)
