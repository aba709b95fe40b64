"""Ahead of time: lowered, compiled and called as the plain function; donated buffers are reused.

Donation by an inner jit is in `test_structural_metadata.py`; every transformation is compiled ahead
of time in `test_composition.py`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import autocast
from tests.support.jaxprs import assert_dots_run_in, find

DTYPES = ["float16", "bfloat16"]
TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2}


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def arguments():
    params = {"w": draw(0, 4, 4) / 2, "b": draw(1, 4) / 4}
    return jax.tree.map(jnp.asarray, params), jnp.asarray(draw(2, 8, 4))


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["w"]) ** 2)


def step(params, x, loss=loss):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


STEPS = {
    "autocast_of_the_step": lambda dtype: autocast(step, compute_dtype=dtype),
    "step_of_an_autocast_loss": lambda dtype: (
        lambda params, x: step(params, x, autocast(loss, compute_dtype=dtype))
    ),
}


def ahead(fn, **options):
    params, x = arguments()
    shapes = jax.eval_shape(lambda *args: args, params, x)
    return jax.jit(fn, **options).lower(*shapes).compile({"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_a_compiled_step_is_called_as_the_plain_one(name, dtype):
    found, plain = ahead(STEPS[name](dtype)), ahead(step)
    assert found.in_tree == plain.in_tree
    assert found.out_tree == plain.out_tree
    assert found.in_avals == plain.in_avals
    assert found.out_info == plain.out_info
    for a, b in zip(*(jax.tree.leaves(f(*arguments())) for f in (found, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE[dtype] * np.max(np.abs(b)))
    params, x = arguments()
    for compiled in (found, plain):
        with pytest.raises(TypeError, match=r"compiled with float32\[8,4\] and called with bf"):
            compiled(params, x.astype(jnp.bfloat16))


def aliases(compiled):
    """Which output reuses the buffer of which argument."""
    (found,) = re.findall(r"input_output_alias=\{ (.*?) \}, entry", compiled.as_text())
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_donated_parameters_are_updated_in_place(name, dtype):
    compiled = ahead(STEPS[name](dtype), donate_argnums=0)
    found = aliases(compiled)
    assert found.count("alias") == 2  # w and b
    assert found == aliases(ahead(step, donate_argnums=0))
    params, x = arguments()
    compiled(params, x)
    assert [leaf.is_deleted() for leaf in jax.tree.leaves(params)] == [True, True]
    assert not x.is_deleted()


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "n"}])
def test_static_arguments(static):
    fn = autocast(lambda x, n: sum(x @ x for _ in range(n)))
    traced = jax.jit(fn, **static).trace(arguments()[0]["w"], n=3)
    assert_dots_run_in("float16", traced.jaxpr)
    assert traced.out_info == jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert len(find(traced.jaxpr, "dot_general")) == 3
