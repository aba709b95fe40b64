"""The scenarios of compilers' mixed-precision passes, with their numbers.

TVM's Relay (1-18) and Relax (19-29), TensorFlow's auto_mixed_precision (30-44), and ModelOpt's
AutoCast with onnxconverter-common (45-59). What is not here is tested elsewhere: softmax and norms
(7, 57) in `test_torch`, clips and lists in ``plan/test_guards.py`` and `conformance` (13, 14, 41),
calls (9, 59) in ``plan/test_calls.py`` and ``loops/test_structural.py``, opaque ones (26) in
``rewrite/test_structural_opaque.py``, the program's own casts of numbers (35) in
``plan/test_number_factors.py``, carries, buffers and sums in them (36 to 38, 44) in ``loops``,
unary operations (42) in `conformance`, one cast per parameter (52) in
``derivatives/test_source_views.py``, arrays without elements (53) by the fuzzer, which operands
vote (2, 10, 21, 62) in ``plan/test_votes.py``, readers of both kinds (19, 27, 33, 34, 39) in
``plan/test_shared_reads.py``, derivatives (62 to 82) and their sums (41, 43) in `test_autodiff` and
`test_models`; parameters that are low already (28) are a case of 31.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import autocast
from tests.support.compiler_programs import (
    COMBINATIONS,
    DTYPES,
    KERNEL,
    X,
    all_casts,
    cast,
    conv,
    of,
    relu,
    round_trips,
    softmax,
)
from tests.support.jaxprs import assert_dots_run_in, dtypes, trace

W = of(6, 6, seed=2)
# Where the planner decides more than the dtypes of products.
WIDE = [pair for pair in COMBINATIONS if pair[1] != "tensor_cores"]


# No exp: in float16 a product of one without a bound is float32.
MADE = {"input": lambda x: x, "computed": jnp.log1p}
PROGRAMS = {
    "6 sum of convolutions": (lambda k, x: conv(x, k) + (conv(x, k) + conv(x, k)), KERNEL, X),
    "20 relu between convolutions": (lambda k, x: conv(relu(conv(x, k)), k), KERNEL, X),
    **{
        f"23 concatenated before the cast, {name}": (
            lambda w, x, f=f: jnp.concatenate([f(x), f(2 * x)]) @ w, W, W
        )
        for name, f in MADE.items()
    },
    **{
        f"24, 51 for a product and a softmax, {name}": (
            lambda w, x, f=f: (v := f(x), v @ w + v.T @ w, softmax(v), jnp.log(v))[1:], W, np.abs(W)
        )
        for name, f in MADE.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "level"), WIDE)
@pytest.mark.parametrize(("fn", "w", "x"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_value_and_a_weight_are_cast_once_and_not_back(fn, w, x, dtype, level):
    with jax.check_tracer_leaks(False):  # custom rules are slow under it
        jaxpr = trace(cast(fn, dtype, level, params=0), w, x)
    assert_dots_run_in(dtype, jaxpr)
    assert not round_trips(jaxpr)
    assert all_casts(jaxpr).count(("float32", dtype)) == 2


# --- what needs more than dtypes ----------------------------------------------------------------

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
