"""A kernel was traced for its dtypes: a cast is refused, a rule for its function obeyed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jmp_autocast import BF16, CastPolicy, Decision, autocast, register_rule
from tests.support.jaxprs import assert_dots_run_in, dtypes, find, trace

X = jnp.linspace(-0.7, 0.7, 64).reshape(8, 8)


def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


@jax.custom_vjp
def doubled(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


def program(x):
    return doubled(x @ x) @ x


@pytest.mark.parametrize("declared", ["float32", "float16"])
def test_a_kernel_gets_what_it_declares(declared):
    def loss(x):
        return jnp.sum((doubled((x @ x).astype(declared)).astype(jnp.float32) @ x) ** 2)

    jaxpr = trace(jax.grad(autocast(loss, policy=BF16)), X)
    (call,) = find(jaxpr, "pallas_call")
    assert dtypes([*call.invars, *call.outvars]) == (declared,) * 2
    assert_dots_run_in("bfloat16", jaxpr)


def test_a_rule_for_the_function_runs_its_kernel_in_16_bits():
    def in_16_bits(eqn):
        assert eqn.function == "doubled"
        dtype = eqn.compute_dtype
        return Decision(emit=doubled, operand_dtype=dtype, output_dtype=dtype)

    low = autocast(program, policy=BF16.with_rules({"custom_vjp_call": in_16_bits}))
    (call,) = find(trace(low, X), "pallas_call")
    assert dtypes([*call.invars, *call.outvars]) == ("bfloat16",) * 2
    np.testing.assert_allclose(low(X), program(X), atol=0.03)
    gradient = jax.grad(lambda x: low(x).sum())(X)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: program(x).sum())(X), atol=0.1)


@pytest.mark.parametrize("policy", ["LOWER_PRECISION_FP", "FP32", "PROMOTE"])
@pytest.mark.parametrize("name", ["pallas_call", "ffi_call", "pure_callback"])
def test_what_cannot_be_obeyed_is_refused_in_a_sentence(name, policy):
    message = f"'{name}' holds a program that was traced for the dtypes .* {policy} cannot"
    with pytest.raises(ValueError, match=message):
        BF16.with_rules({name: policy})
    with pytest.raises(ValueError, match=message):
        register_rule(name, CastPolicy[policy])
    assert BF16.with_rules({name: "keep"}).rules == (("*", name, CastPolicy.KEEP),)


def test_a_rule_function_is_refused_as_well():
    policy = BF16.with_rules({"pallas_call": lambda eqn: CastPolicy.LOWER_PRECISION_FP})
    with pytest.raises(ValueError, match="LOWER_PRECISION_FP cannot be obeyed"):
        jax.eval_shape(autocast(program, policy=policy), X)
