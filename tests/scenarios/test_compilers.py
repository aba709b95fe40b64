"""What compilers' mixed-precision passes test and single equations do not show.

The gradients of four models have no sum in 16 bits and no product of two dtypes (63, 68, 69); what
is in 16 bits already, and what is returned as it is, stays (31, 55).
"""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import autocast
from jmp_autocast.interpreters.compat import Literal, scan_split
from tests.corpus.sources import benchmark_models
from tests.support.compiler_programs import (
    COMBINATIONS,
    DTYPES,
    all_casts,
    cast,
    conv,
    mixed_dots,
    of,
)
from tests.support.jaxprs import assert_dots_run_in, dtypes, find, inner_jaxprs, open_jaxpr, trace

in_combinations = pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)

MODELS = ["GPT", "ViT", "ResNet", "LSTM"]


@pytest.fixture(scope="module")
def losses():
    """For each model its loss, and the shapes of its parameters and of a batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # to which the source appends
        yield {program.name: program.build() for program in benchmark_models()}
        for name in [n for n in sys.modules if n.split(".")[0] == "comparison"]:
            del sys.modules[name]


@pytest.fixture
def no_low_sums():
    """Under it JAX refuses to trace a sum in 16 bits."""
    jax.config.update("jax_allow_f16_reductions", False)
    with jax.check_tracer_leaks(False):  # which turns JAX's caches of traces off
        yield
    jax.config.update("jax_allow_f16_reductions", True)


@pytest.mark.usefixtures("no_low_sums")
@in_combinations
@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_of_a_model(losses, model, dtype, level):
    loss, (params, batch) = losses[model]
    jaxpr = trace(jax.grad(cast(loss, dtype, level), has_aux=True), params, batch)
    assert_dots_run_in(dtype, jaxpr)
    assert not mixed_dots(jaxpr)
    sums = [e for e in find(jaxpr, "reduce_sum") if not adds_nothing_up(e)]
    sums += find(jaxpr, "scatter-add", "cumsum")
    assert {*dtypes([e.outvars[0] for e in sums])} == {"float32"}
    count = len(jax.tree.leaves(params))
    assert count > 4
    for gradient in jaxpr.jaxpr.outvars[:count]:
        assert gradient.aval.dtype == jnp.float32
        assert_sum_is_float32(open_jaxpr(jaxpr), gradient)


@pytest.mark.usefixtures("no_low_sums")
def test_the_check_sees_a_sum_in_16_bits():
    with pytest.raises(ValueError, match="reduce_sum on operand bf16"):
        trace(jax.grad(lambda b: jnp.sum((b.astype(jnp.bfloat16) + X).astype(jnp.float32))), X[0])


X = jnp.asarray(of(4, 4), jnp.bfloat16)
_SUMS = ("add_any", "reduce_sum", "scatter-add")
_MOVES = ("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze", "rev")


def adds_nothing_up(eqn):
    """Whether the axes of a sum have one element: it undoes a broadcast."""
    return eqn.invars[0].aval.size == eqn.outvars[0].aval.size


def assert_sum_is_float32(jaxpr, gradient):
    """From the last sum on, a gradient is float32, and it is not cast down after it."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    while not isinstance(gradient, Literal) and gradient in makers:
        eqn = makers[gradient]
        name, k = eqn.primitive.name, eqn.outvars.index(gradient)
        if name in _MOVES or (name == "reduce_sum" and adds_nothing_up(eqn)):
            gradient = eqn.invars[0]
            continue
        if name in _SUMS or (name == "scan" and k < scan_split(eqn.params)[1]):
            assert gradient.aval.dtype == jnp.float32, eqn
        elif name in ("jit", "remat2"):
            (inner,) = inner_jaxprs(eqn)
            assert_sum_is_float32(open_jaxpr(inner), open_jaxpr(inner).outvars[k])
        break


W = of(6, 6, seed=2)
LOW_PROGRAMS = {
    "convolution": lambda w, x: jnp.abs(conv(x[None, None], w[None, None, :3, :3])),
    "branches": lambda w, x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x @ w),
}


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
@pytest.mark.parametrize("fn", LOW_PROGRAMS.values(), ids=LOW_PROGRAMS)
def test_a_low_program_is_left_alone(fn, dtype, level):
    """31: at each level; what the program itself declares in 16 bits is not cast up."""
    w, x = jnp.asarray(W, dtype), jnp.asarray(of(6, 6), dtype)
    assert str(trace(cast(fn, dtype, level), w, x)) == str(trace(fn, w, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output_dtype", ["same", "computed"])
def test_an_input_that_is_an_output(output_dtype, dtype):
    """55: as it is, or in the program's own cast, beside a product that reads it low."""
    other = "float16" if dtype == "bfloat16" else "bfloat16"
    fn = lambda w, x: (x, x.astype(dtype), x.astype(other), x.astype(jnp.int32), w, x @ w)
    jaxpr = trace(autocast(fn, dtype, output_dtype=output_dtype), W, W).jaxpr
    assert [jaxpr.outvars[4], jaxpr.outvars[0]] == jaxpr.invars
    assert dtypes(jaxpr.outvars)[:5] == ("float32", dtype, other, "int32", "float32")
    alone = trace(autocast(lambda x: x.astype(dtype), dtype), W)
    assert all_casts(alone) == [("float32", dtype)]
