"""Mistakes of a caller: each message names the argument, the value and what to do instead."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Primitive

from jmp_autocast import (
    BF16,
    CastPolicy,
    Decision,
    Policy,
    autocast,
    compute_precision,
    register_policy,
)
from jmp_autocast.policies import parse_policy

X = np.ones((2, 2), np.float32)

COMPUTE_DTYPE = r"compute_dtype must be float16 or bfloat16, got {}.*enabled=False"

VALUES = {
    "float32": (
        lambda: autocast(jnp.sin, compute_dtype="float32"),
        COMPUTE_DTYPE.format("float32"),
    ),
    "float64": (lambda: autocast(jnp.sin, compute_dtype=float), COMPUTE_DTYPE.format("float64")),
    "int8": (lambda: autocast(jnp.sin, compute_dtype=jnp.int8), COMPUTE_DTYPE.format("int8")),
    "float8": (
        lambda: autocast(compute_dtype=jnp.float8_e4m3fn),
        COMPUTE_DTYPE.format("float8_e4m3fn"),
    ),
    "policy_compute_dtype": (lambda: Policy(np.float32), COMPUTE_DTYPE.format("float32")),
    "no_dtype": (
        lambda: autocast(jnp.sin, compute_dtype="halfish"),
        "compute_dtype must be a dtype.*halfish",
    ),
    "contradiction": (
        lambda: autocast(jnp.sin, policy=BF16, compute_dtype="float16"),
        "compute_dtype=float16 contradicts the policy's bfloat16; leave one of them out",
    ),
    "output_dtype": (
        lambda: autocast(jnp.sin, output_dtype="int32"),
        "output_dtype must be 'same', 'computed', float32, float16 or bfloat16, got int32",
    ),
    "output_dtype_word": (
        lambda: autocast(jnp.sin, output_dtype="whatever"),
        "output_dtype must be.*'whatever'",
    ),
    "policy_output_dtype": (
        lambda: Policy("float16", output_dtype="int32"),
        "output_dtype must be float32, float16 or bfloat16, got int32",
    ),
    "on_unknown": (
        lambda: autocast(jnp.sin, on_unknown="ignore"),
        "on_unknown must be 'keep', 'warn' or 'error', got 'ignore'",
    ),
    "unknown_primitive": (
        lambda: BF16.with_rules({"dot_genral": "KEEP"}),
        "Unknown primitive 'dot_genral' in with_rules. Did you mean 'dot_general'.*register_policy",
    ),
    "unknown_primitive_unlike_any": (
        lambda: BF16.with_rules({"qqqq": "KEEP"}),
        r"Unknown primitive 'qqqq' in with_rules\. For",
    ),
    "unknown_policy": (
        lambda: BF16.with_rules({"exp": "promot"}),
        "Unknown policy 'promot' in the rule for primitive 'exp'. Did you mean 'PROMOTE'"
        ".*LOWER_PRECISION_FP, FP32, FP32_SET_OPT_DTYPE, FP32_APPEND_DTYPE, PROMOTE, KEEP",
    ),
    "unknown_registered_policy": (
        lambda: register_policy("mine", "fp23"),
        "Unknown policy 'fp23'.*'mine'.*mean 'FP32'",
    ),
    "structural_rule": (
        lambda: BF16.with_rules({"scan": "KEEP"}),
        "'scan' is structural.*with_scopes",
    ),
    "structural_primitive_object": (
        lambda: BF16.with_rules({lax.while_p: "KEEP"}),
        "'while' is structural.*with_scopes",
    ),
    "structural_registration": (
        lambda: register_policy("cond", "KEEP"),
        "'cond' is structural.*with_scopes",
    ),
    "scope_dtype": (
        lambda: BF16.with_scopes({"*/ln": "float64"}),
        r"scopes\['\*/ln'\] must be float32, float16 or bfloat16, got float64",
    ),
    "scope_no_dtype": (
        lambda: BF16.with_scopes({"*/ln": "full"}),
        r"scopes\['\*/ln'\] must be a dtype, got 'full'",
    ),
    "compute_precision": (
        lambda: compute_precision("float64"),
        "compute_precision takes float16, bfloat16 or float32, got float64",
    ),
    "decision_output": (
        lambda: Decision(policy=CastPolicy.KEEP, output_dtype="float64"),
        "Decision.output_dtype must be float32, float16 or bfloat16, got float64",
    ),
    "decision_accumulator": (
        lambda: Decision(policy=CastPolicy.KEEP, accumulate_dtype="bfloat16"),
        "Decision.accumulate_dtype must be float32 or None.*Got bfloat16",
    ),
    "string_key": (
        lambda: autocast(jnp.sin, policy="compte=bf16"),
        "Cannot read 'compte=bf16' in the policy.*Did you mean 'compute'.*Write 'params=float32",
    ),
    "string_without_compute": (
        lambda: parse_policy("output=float32"),
        "names no compute dtype; add 'compute=bfloat16'",
    ),
    "string_dtype": (lambda: parse_policy("compute=bf17"), "compute must be a dtype, got 'bf17'"),
    "string_params": (
        lambda: parse_policy("params=bf16,compute=bf16"),
        "params must be float32, got bfloat16",
    ),
    "jmp_params": (
        lambda: autocast(jnp.sin, policy=jmp.get_policy("bfloat16")),
        "params must be float32, got bfloat16.*cast once",
    ),
    "params": (
        lambda: autocast(lambda p, x: x, params=2),
        "params=2 is out of range: <lambda> takes 2 positional arguments, numbered from 0",
    ),
    "negative_params": (
        lambda: autocast(lambda p, x: x, params=(0, -3)),
        "params=-3 is out of range",
    ),
    "params_of_keywords": (
        lambda: autocast(lambda p, *, x: x, params=1),
        "params=1 is out of range.*takes 1 pos",
    ),
    "params_at_the_call": (
        lambda: autocast(lambda *args: args[0], params=2)(X, X),
        "params=2 is out of range of the 2 positional arguments in this call of <lambda>",
    ),
}


@pytest.mark.parametrize(("call", "message"), VALUES.values(), ids=VALUES)
def test_a_wrong_value(call, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


def returns(value):
    def my_rule(eqn):
        return value

    fn = autocast(jnp.exp, policy=BF16.with_rules({"exp": my_rule}))
    return lambda: fn(X)


TYPES = {
    "array": (lambda: autocast(X), r"autocast takes a callable, got .*ndarray.*by keyword"),
    "dtype_first": (lambda: autocast("bfloat16"), "takes a callable, got 'bfloat16' of type str"),
    "decorated_value": (
        lambda: autocast(compute_dtype="bfloat16")(3),
        "takes a callable, got 3 of type int",
    ),
    "traced_enabled": (
        lambda: jax.jit(lambda on, x: autocast(jnp.sin, enabled=on)(x))(True, X),
        "enabled must be known when the program is traced.*static argument.*jax.lax.cond",
    ),
    "enabled": (lambda: autocast(jnp.sin, enabled="no"), "enabled must be a bool, got 'no'"),
    "params": (
        lambda: autocast(jnp.sin, params="weights"),
        r"params must be the position of an argument.*predicate.*got 'weights'",
    ),
    "params_bool": (lambda: autocast(jnp.sin, params=True), "params must be.*got True"),
    "params_list": (lambda: autocast(jnp.sin, params=[0, "x"]), r"params must be.*got \[0, 'x'\]"),
    "policy": (
        lambda: autocast(jnp.sin, policy=jnp.bfloat16),
        "policy must be a jmp_autocast.Policy, a string such as.*jmp.Policy, got.*bfloat16",
    ),
    "rule": (
        lambda: BF16.with_rules({"exp": 32}),
        "rule for primitive 'exp' must be a CastPolicy, its name, or.*got 32 of type int",
    ),
    "rule_class": (
        lambda: BF16.with_rules({"exp": CastPolicy}),
        "rule for primitive 'exp' must be",
    ),
    "rule_key": (
        lambda: BF16.with_rules({jnp.exp: "KEEP"}),
        "given by its name or as a jax.extend.core.Pr",
    ),
    "rules": (lambda: BF16.with_rules([("exp", "KEEP")]), "rules must be a mapping.*type list"),
    "scopes": (
        lambda: BF16.with_scopes("*/ln"),
        r"scopes must be a mapping, got '\*/ln' of type str",
    ),
    "scope_pattern": (
        lambda: BF16.with_scopes({nn.LayerNorm: "float32"}),
        "scope pattern must be a string, got",
    ),
    "level": (
        lambda: register_policy("mine", "KEEP", level="high"),
        "level must be an int.*'high'",
    ),
    "decision_policy": (
        lambda: Decision(policy="KEEP"),
        "Decision.policy must be a CastPolicy.*'KEEP'",
    ),
    "rule_returns_nothing": (
        returns(None),
        "rule for primitive 'exp', .*my_rule, returned None of type NoneType; a rule must return",
    ),
    "rule_returns_a_name": (returns("FP32"), "my_rule, returned 'FP32' of type str"),
    "rule_returns_a_dtype": (returns(jnp.float32), "must return a CastPolicy or a Decision"),
}


@pytest.mark.parametrize(("call", "message"), TYPES.values(), ids=TYPES)
def test_a_wrong_type(call, message):
    with pytest.raises(TypeError, match=f"(?s){message}"):
        call()


def test_wrong_params_are_told_when_wrapped():
    """And not first at the call, where the signature is known."""
    for wrong in (3, -4, (0, 3)):
        with pytest.raises(ValueError, match="out of range: rms_norm takes 3 positional"):
            autocast(rms_norm, params=wrong)
    assert autocast(rms_norm, params=(0, 2, -1))


def rms_norm(scale, x, eps=1e-6):
    return scale * x * lax.rsqrt(jnp.mean(x * x) + eps)


# --- primitives without a rule --------------------------------------------------------------

mystery = Primitive("test_errors_mystery")
mystery.def_abstract_eval(lambda x: x)
mystery.def_impl(lambda x: x)


def two_mysteries(x):
    return mystery.bind(x @ x) + mystery.bind(x)


def in_a_jit(x):
    return jax.jit(mystery.bind)(x @ x)


def test_an_unknown_primitive_is_kept_in_silence_by_default():
    autocast(two_mysteries)(X)


MESSAGE = (
    "{} holds primitives without a cast policy: test_errors_mystery. .*declared dtypes"
    ".*register_policy or Policy.with_rules"
)


def test_an_unknown_primitive_can_warn():
    with pytest.warns(UserWarning, match=MESSAGE.format("two_mysteries")) as caught:
        autocast(two_mysteries, on_unknown="warn")(X)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_an_unknown_primitive_can_be_an_error():
    fn = autocast(in_a_jit, on_unknown="error")
    with pytest.raises(ValueError, match=MESSAGE.format("in_a_jit")):
        jax.make_jaxpr(fn)(X)
    register_policy(mystery, CastPolicy.PROMOTE)
    jax.make_jaxpr(fn)(X)


# --- modules that change while they are traced ----------------------------------------------


class Norm(nnx.Module):
    """Counts its calls, as batch statistics and RNG counters do."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones((2, 2)))
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.count.set_value(self.count.get_value() + 1)
        return x @ self.weight.get_value()


def call_module(module, x):
    return module(x)


def call_in_a_tree(tree, x):
    return tree["layers"][0](x)


CHANGES = {
    "argument": ("call_module", "Norm", lambda m: autocast(call_module)(m, X)),
    "in_a_tree": ("call_in_a_tree", "Norm", lambda m: autocast(call_in_a_tree)({"layers": [m]}, X)),
    "callable_object": ("Norm", "Norm", lambda m: autocast(m)(X)),
    "bound_method": ("__call__", "Norm", lambda m: autocast(m.__call__)(X)),
    "closure": ("<lambda>", "an NNX module", lambda m: autocast(lambda x: m(x))(X)),
    "under_jit": ("<lambda>", "an NNX module", lambda m: jax.jit(autocast(lambda x: m(x)))(X)),
}


@pytest.mark.parametrize(("name", "module", "call"), CHANGES.values(), ids=CHANGES)
def test_a_module_that_changes_is_refused(name, module, call):
    """Its change would be lost in silence."""
    model = Norm()
    message = (
        f"{name} changes the state of {module} .*would be lost.*"
        "jmp_autocast.integrations.nnx.autocast.*return the new state"
    )
    with pytest.raises(TypeError, match=message):
        call(model)
    assert model.count.get_value() == 0


def test_a_module_that_does_not_change_is_fine():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for fn in (lambda m, x: m(x), lambda m, x: autocast(lambda x: m(x))(x)):
        assert autocast(fn)(model, X).dtype == jnp.float32
