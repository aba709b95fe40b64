"""Policies: their value semantics, string forms, and what each cast policy does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import (
    BF16,
    FP16,
    CastPolicy,
    Policy,
    autocast,
)
from jmp_autocast.policies.parse import parse_policy
from tests.support.jaxprs import dot_dtypes, dtypes, find
from tests.support.policy_programs import FULL, LOW, X, after_dot, io, rewritten


def test_a_policy_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BF16.compute_dtype = jnp.float16
    changed = BF16.with_rules({"tanh": "FP32"}).with_rules({"*": "float32"}, scope="*/ln")
    assert changed.rules == (
        ("*", "tanh", CastPolicy.FP32),
        ("*/ln", "*", np.dtype("float32")),
    )
    assert BF16.rules == ()


def rule(eqn):
    return CastPolicy.PROMOTE


MADE_TWICE = {
    "preset": lambda: Policy(jnp.bfloat16),
    "dtype_by_name": lambda: Policy("bfloat16"),
    "with_rules": lambda: BF16.with_rules({"tanh": "FP32", "exp": rule}),
    "scopes": lambda: BF16.with_rules({"*": "float32"}, scope="a/*").with_rules(
        {"*": jnp.float16}, scope="b"
    ),
    "output_dtype": lambda: Policy(jnp.bfloat16, output_dtype="float32"),
    "replaced_rule": lambda: BF16.with_rules({"exp": "KEEP"}).with_rules({"exp": "FP32"}),
}


@pytest.mark.parametrize("make", MADE_TWICE.values(), ids=MADE_TWICE)
def test_equal_policies_hash_the_same(make):
    assert make() == make()
    assert hash(make()) == hash(make())
    assert len({make(), make(), FP16}) == 2


def test_a_later_rule_replaces_and_a_later_pattern_is_last():
    policy = BF16.with_rules({"exp": "KEEP", "tanh": "FP32"}).with_rules({"exp": "PROMOTE"})
    assert policy.rules == (("*", "tanh", CastPolicy.FP32), ("*", "exp", CastPolicy.PROMOTE))
    policy = (
        BF16.with_rules({"*": "float32"}, scope="a")
        .with_rules({"*": "float32"}, scope="b")
        .with_rules({"*": "float16"}, scope="a")
    )
    assert [scope for scope, _, _ in policy.rules] == ["b", "a"]


@pytest.mark.parametrize("key", ["tanh", lax.tanh_p], ids=["name", "primitive"])
@pytest.mark.parametrize("value", [CastPolicy.FP32, "FP32", "fp32", "float32"])
def test_forms_of_a_rule(key, value):
    assert BF16.with_rules({key: value}).rules == (("*", "tanh", CastPolicy.FP32),)


def test_presets():
    assert Policy(jnp.float16) == FP16
    assert Policy() == Policy("default") != BF16
    assert repr(Policy(level="compute")) == "Policy(default, level='compute')"
    assert Policy(jnp.bfloat16) == BF16


# --- string forms and jmp -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bfloat16", BF16),
        ("bf16", BF16),
        ("mixed_bfloat16", BF16),
        ("float16", FP16),
        ("compute=bfloat16", BF16),
        (" params = float32 , compute = f16 ", FP16),
        ("params=float32,compute=bfloat16,output=float32", Policy("bfloat16", "float32")),
        ("output=bf16,p=f32,c=bf16", Policy("bfloat16", "bfloat16")),
        ("o=float16,compute=bfloat16,", Policy("bfloat16", "float16")),
    ],
)
def test_string_forms(text, expected):
    assert parse_policy(text) == expected
    assert autocast(jnp.sin, policy=text) == autocast(jnp.sin, policy=expected)


def test_the_policy_names_the_output_dtype():
    policy = Policy("bfloat16", "bfloat16")
    assert autocast(jnp.matmul, policy=policy)(X, X).dtype == jnp.bfloat16
    assert autocast(jnp.exp, policy=policy)(X).dtype == jnp.bfloat16
    # An argument of the call beats it.
    assert autocast(jnp.matmul, policy=policy, output_dtype="float32")(X, X).dtype == jnp.float32


# --- the six members ------------------------------------------------------------------------


def scatter_add(h):
    return h.at[np.array([0, 0])].add(jnp.tanh(h[:2]))


def convolution(x):
    return lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME")


MEMBERS = [
    ("LOWER_PRECISION_FP", convolution, "conv_general_dilated", (LOW, LOW), LOW),
    ("FP32", after_dot(jnp.exp), "exp", (FULL,), FULL),
    ("FP32_SET_OPT_DTYPE", after_dot(jnp.sum), "reduce_sum", (FULL,), FULL),
    ("FP32_APPEND_DTYPE", after_dot(scatter_add), "scatter-add", (FULL, "int32", FULL), FULL),
    ("PROMOTE", after_dot(lambda h: (h * jnp.tanh(h)) @ h.T), "mul", (LOW, LOW), LOW),
    ("PROMOTE", lambda x: (x @ x) * x, "mul", (FULL, FULL), FULL),
    ("KEEP", after_dot(lambda h: lax.reduce_precision(h, 8, 4)), "reduce_precision", (FULL,), FULL),
]


@pytest.mark.parametrize(
    ("member", "fn", "primitive", "operands", "result"),
    MEMBERS,
    ids=["LOWER_PRECISION_FP", "FP32", "SET_OPT", "APPEND", "PROMOTE_low", "PROMOTE_full", "KEEP"],
)
def test_what_each_policy_does(member, fn, primitive, operands, result):
    found, _ = BF16.rule_for(primitive)
    assert found is CastPolicy[member]
    assert io(rewritten(fn, X), primitive) == (operands, (result,))


def test_a_reduction_accumulates_in_float32_and_the_users_narrowing_stands():
    jaxpr = rewritten(after_dot(lambda h: jnp.sum(h, axis=0).astype(jnp.bfloat16)), X)
    assert io(jaxpr, "reduce_sum") == ((FULL,), (FULL,))
    assert dtypes(jaxpr.jaxpr.outvars) == (LOW,)


def test_a_scatter_is_emitted_with_a_float32_adder():
    jaxpr = rewritten(after_dot(scatter_add), X)
    (eqn,) = find(jaxpr, "scatter-add")
    assert dtypes(eqn.params["update_jaxpr"].invars) == (FULL, FULL)
    out = jax.jit(autocast(after_dot(scatter_add), policy=BF16))(X)
    np.testing.assert_allclose(out[0], 8 + 2 * np.tanh(8), rtol=2**-8)


@pytest.mark.parametrize(
    ("method", "expected"), [("add", 24), ("mul", 128), ("max", 16), ("min", 8)]
)
def test_a_rule_sets_the_dtype_of_the_update_computation_of_a_scatter(method, expected):
    """JAX lowers no maximum of float32 numbers for 16-bit operands."""
    fn = after_dot(lambda h: getattr(h.at[0], method)(2 * h[1]))
    policy = BF16.with_rules({f"scatter-{method}": LOW})
    (eqn,) = find(rewritten(fn, X, policy=policy), f"scatter-{method}")
    update = eqn.params["update_jaxpr"]
    assert {*dtypes([*eqn.outvars, *update.invars, *update.outvars])} == {LOW}
    np.testing.assert_array_equal(jax.jit(autocast(fn, policy=policy))(X)[0], expected)


@pytest.mark.parametrize(
    ("rules", "fn", "dtype"),
    [
        ({}, after_dot(lambda h: (h[0] @ h[1]) * jnp.tanh(h)[0, 0]), LOW),
        ({"dot_general": "PROMOTE"}, lambda x: jnp.sin(x.astype(LOW) @ x.astype(LOW)), LOW),
        ({"dot_general": "FP32"}, lambda x: jnp.sin(x.astype(LOW) @ x.astype(LOW)), FULL),
    ],
    ids=["vectors_promote", "promote", "float32"],
)
def test_the_element_type_of_a_dot_follows_its_policy(rules, fn, dtype):
    """Also where it is not lowered: the result must have the dtype that is planned for it."""
    jaxpr = rewritten(fn, X, policy=BF16.with_rules(rules))
    assert dot_dtypes(jaxpr)[-1] == (dtype,) * 3


@pytest.mark.parametrize("member", list(CastPolicy), ids=lambda p: p.name)
@pytest.mark.parametrize("given", ["a low value", "a float32 value"])
def test_a_rule_gives_a_primitive_any_policy(member, given):
    fn = after_dot(jnp.tanh) if given == "a low value" else jnp.tanh
    jaxpr = rewritten(fn, X, policy=BF16.with_rules({"tanh": member}))
    low = {
        CastPolicy.LOWER_PRECISION_FP: LOW,
        CastPolicy.PROMOTE: LOW if given == "a low value" else FULL,
    }
    dtype = low.get(member, FULL)
    assert io(jaxpr, "tanh") == ((dtype,), (dtype,))


def test_a_promoted_primitive_lies_between_two_products():
    """Without the rule an `exp` is float32, and a `tanh` before it leads to no product."""
    fn = lambda x: jnp.exp(jnp.tanh(x @ x)) @ x
    for rules, dtype in ({}, FULL), ({"exp": "promote"}, LOW):
        jaxpr = rewritten(fn, X, policy=BF16.with_rules(rules))
        assert io(jaxpr, "tanh") == io(jaxpr, "exp") == ((dtype,), (dtype,))
