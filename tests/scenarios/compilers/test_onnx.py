"""The scenarios of ModelOpt's AutoCast and onnxconverter-common (45-59)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast
from tests.support.compiler_programs import (
    COMBINATIONS,
    DTYPES,
    LEVELS,
    all_casts,
    cast,
    of,
    relu,
    result_dtypes,
    round_trips,
    works,
)
from tests.support.jaxprs import assert_dots_run_in, casts, dtypes, find, trace

in_combinations = pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)

W = of(6, 6) / 2


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_of_both_classes(level):
    """52: it stays as it is for float32; its one cast is for the products."""
    fn = lambda params, x: x @ params["w"] @ params["w"] + jnp.exp(params["w"])
    jaxpr = trace(cast(fn, level=level), {"w": W}, of(3, 6)[:1].repeat(6, 0))
    parameter = jaxpr.jaxpr.invars[0]
    down = casts(jaxpr, "float32", "bfloat16")
    assert sum(eqn.invars[0] is parameter for eqn in down) == 1
    (exp,) = find(jaxpr, "exp")
    assert exp.invars == [parameter]


EMPTY = {
    "rows": (of(0, 6), W),
    "contraction": (of(3, 0), of(0, 6)),
    "columns": (of(3, 6), of(6, 0)),
    "batch": (of(0, 3, 6), of(0, 6, 2)),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("args", EMPTY.values(), ids=EMPTY)
def test_arrays_without_elements(args, level):
    """53: also as constants."""
    fn = lambda x, w: relu(x @ w + jnp.zeros(w.shape[-1])) / 2
    assert_dots_run_in("bfloat16", trace(cast(fn, level=level), *args))
    closed = cast(lambda: fn(*args), level=level)
    found, of_constants, expected = jax.jit(
        lambda *args: (cast(fn, level=level)(*args), closed(), fn(*args))
    )(*args)
    for out in (found, of_constants):
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output_dtype", ["same", "computed"])
def test_an_input_that_is_an_output(output_dtype, dtype):
    """55: as it is, or in the program's own cast, beside a product that reads it low."""
    other = jnp.float16 if dtype == "bfloat16" else jnp.bfloat16

    def fn(w, x):
        return x, x.astype(dtype), x.astype(other), x.astype(jnp.int32), w, x @ w

    jaxpr = trace(autocast(fn, compute_dtype=dtype, output_dtype=output_dtype), W, W)
    outputs = jaxpr.jaxpr.outvars
    assert outputs[0] is jaxpr.jaxpr.invars[1]
    assert outputs[4] is jaxpr.jaxpr.invars[0]
    declared = ("float32", dtype, jnp.dtype(other).name, "int32", "float32")
    assert dtypes(outputs)[:5] == declared
    alone = trace(autocast(lambda x: x.astype(dtype), compute_dtype=dtype), W)
    assert all_casts(alone) == [("float32", dtype)]


def layer_norm(x, scale, bias):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-6) * scale + bias


@in_combinations
def test_a_decomposed_layer_norm_is_a_unit(dtype, level):
    """57: one cast into it and one out of it; everything between is float32."""
    fn = lambda w, x, s, b: layer_norm(x @ w, s, b) @ w
    jaxpr = trace(cast(fn, dtype, level), W, of(3, 6), of(6), of(6))
    inside = [
        pair for pair in works(jaxpr) if pair[0] not in ("dot_general", "accumulate", "source_view")
    ]
    compute = [d for name, d in inside if name not in ("broadcast_in_dim", "reshape")]
    assert set(compute) == {"float32"}
    activations = [
        e for e in find(jaxpr, "convert_element_type") if e.invars[0].aval.shape == (3, 6)
    ]
    # The input of the program, into the norm, out of it, and on return.
    assert [dtypes((*e.invars, *e.outvars)) for e in activations] == [
        ("float32", dtype),
        (dtype, "float32"),
        ("float32", dtype),
        (dtype, "float32"),
    ]
    assert not round_trips(jaxpr)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loop_a_branch_and_a_call_in_one_another(level):
    """59: control flow is entered at each level, and nothing inside it stays float32."""

    def fn(w, x):
        step = lambda h, _: (lax.cond(h[0, 0] > 0, layer, lambda w, h: h, w, h), None)
        layer = jax.jit(lambda w, h: jnp.tanh(h @ w))
        body = lambda _, h: lax.scan(step, h, None, length=2)[0]
        return lax.fori_loop(0, 2, body, x)

    jaxpr = trace(cast(fn, level=level, params=0), W, W)
    assert_dots_run_in("bfloat16", jaxpr)
    expected = "float32" if level == "tensor_cores" else "bfloat16"
    assert result_dtypes(jaxpr, "tanh") == [expected]
