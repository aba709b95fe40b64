"""Wrong uses of policies, rules and the registry."""

import flax.linen as nn
import jmp
import numpy as np
from jax import lax

from jmp_autocast import (
    CastPolicy,
    Decision,
    Float8,
    Policy,
    autocast,
    in_compute_dtype,
    register_rule,
)

from .row import Row, loss, rows
from .transform_rows import Unhashable

NAMES = "LOWER_PRECISION_FP, FP32, FP32_SET_OPT_DTYPE, FP32_APPEND_DTYPE, PROMOTE, KEEP"
FLOATS = "must be float32, float16 or bfloat16"
RULE = "must be a CastPolicy, its name, or a function"
WHAT = "must be a CastPolicy, a dtype, a precision"
SCHEMA = "Write 'params=float32,compute=bfloat16,output=float32'"


def _policy(mistake, error, *parts, **fields):
    return Row("Policy", mistake, lambda w: Policy(**fields), error, *parts)


def _rules(mistake, rules, error, *parts):
    call = lambda w: w.policy.with_rules(rules)
    return Row("Policy", mistake, call, error, *parts)


def _scopes(mistake, scope, what, error, *parts):
    call = lambda w: w.policy.with_rules({"*": what}, scope=scope)
    return Row("Policy", mistake, call, error, *parts)


def _retired(name, *parts):
    call = lambda w: Policy(**{name: ()})
    return Row("Policy", f"an option that is gone: {name}", call, TypeError, *parts)


def _gone(name, *parts):
    call = lambda w: getattr(w.policy, name)
    return Row("Policy", f"a method that is gone: {name}", call, AttributeError, *parts)


def _string(mistake, text, *parts):
    call = lambda w: autocast(loss, policy=text)
    return Row("autocast", f"policy: {mistake}", call, ValueError, *parts)


def _register(mistake, primitive, given, error, *parts, **options):
    call = lambda w: register_rule(primitive, given, **options)
    return Row("register_rule", mistake, call, error, *parts)


def _decision(mistake, error, *parts, **fields):
    call = lambda w: Decision(**{"policy": CastPolicy.KEEP, **fields})
    return Row("Decision", mistake, call, error, *parts)


ROWS = [
    *rows(
        TypeError,
        {
            "Float8: no multiple": (
                lambda w: Float8(multiple=True),
                "Float8.multiple | True of type bool | must be an integer | such as 16",
            ),
            "in_compute_dtype: the result of a kernel": (
                lambda w: in_compute_dtype(np.ones((2, 2), np.float32)),
                r"in_compute_dtype | float32\[2,2\] | takes a function | in_compute_dtype\(my",
            ),
        },
    ),
    *rows(
        ValueError,
        {
            "autocast: a jmp policy with 16-bit parameters": (
                lambda w: autocast(loss, policy=jmp.get_policy("bfloat16")),
                "params | bfloat16 | must be float32 | cast once in the traced graph",
            ),
        },
    ),
    _policy(
        "float64",
        ValueError,
        "compute_dtype | float64 | must be float16 or bfloat16 | enabled=False",
        compute_dtype=np.float64,
    ),
    _policy(
        "int32", ValueError, f"output_dtype | int32 | {FLOATS} | float32", output_dtype="int32"
    ),
    *(
        _retired(name, f"Policy | takes no {name}= | Write | {instead}")
        for name, instead in {
            "dot_output": "'FP32_APPEND_DTYPE'",
            "weight_gradients": "level='by_hand'",
            "scopes": "with_rules",
            "scoped_rules": "with_rules",
            "precisions": "'highest'",
            "kernels": "in_compute_dtype",
            "storage": "16-bit array",
        }.items()
    ),
    *(
        _gone(name, f"Policy | has no '{name}' | Write | {instead}")
        for name, instead in {
            "with_scopes": "with_rules",
            "with_precision": "with_rules",
            "with_level": r"replace\(policy, level",
            "with_kernels": "in_compute_dtype",
            "with_storage": "16-bit array",
        }.items()
    ),
    _policy(
        "matmul",
        ValueError,
        "matmul | 'float9' | 'float8', 'float8_row', got | mean",
        matmul="float9",
    ),
    _policy(
        "a mapping of rules",
        TypeError,
        r"rules | of type dict | must be a tuple of triples | with_rules\(",
        rules={"exp": CastPolicy.FP32},
    ),
    _policy(
        "no policy in the rules",
        TypeError,
        f"rule for primitive 'exp' | got 3 of type int | {WHAT} | CastPolicy",
        rules=(("*", "exp", 3),),
    ),
    *(
        _rules(mistake, rules, ValueError, parts)
        for mistake, (rules, parts) in {
            "a primitive like no other": (
                {"qqqq": "KEEP"},
                r"with_rules | 'qqqq' | Unknown primitive | For a primitive of another",
            ),
            "an unknown primitive": (
                {"dot_genral": "KEEP"},
                "with_rules | 'dot_genral' | Unknown primitive | mean 'dot_general'.*register_rule",
            ),
            "an unknown policy": (
                {"exp": "promot"},
                f"primitive 'exp' | 'promot' | a cast policy .{NAMES} | mean 'PROMOTE'",
            ),
            "a structural primitive": (
                {"scan": "KEEP"},
                "Primitive | 'scan' | is structural | scope=",
            ),
            "a pattern for a primitive": (
                {"*/ln": "float32"},
                r"with_rules | '\*/ln' | Unknown primitive | by scope=: with_rules\(\{'\*': ...\}",
            ),
            "8 bits for tanh": (
                {"tanh": "float8"},
                "'tanh' | 8 bits | is none | 'float8' to '\\*'",
            ),
            "a precision for tanh": ({"tanh": "high"}, "'tanh' | 'high' | of products | to '\\*'"),
        }.items()
    ),
    *(
        _rules(mistake, rules, TypeError, parts)
        for mistake, (rules, parts) in {
            "no mapping": (
                [("exp", "KEEP")],
                r"rules | of type list | must be a mapping | with_rules\(\{'tanh'",
            ),
            "a function of nothing": (
                {"exp": lambda: CastPolicy.KEEP},
                r"rule for primitive 'exp' | <lambda>\(\) | must take one argument | "
                "an EquationView",
            ),
            "a rule without a hash": (
                {"exp": Unhashable()},
                "rule for primitive 'exp' | Unhashable object | must be hashable | Use a function",
            ),
        }.items()
    ),
    _scopes("None", "*/ln", None, TypeError, rf"primitive '\*' | None of type | {WHAT} | a name"),
    _scopes(
        "a class",
        nn.LayerNorm,
        "float32",
        TypeError,
        r"scope pattern | LayerNorm'> | must be a string | Write one such as '\*/LayerNorm_\*'",
    ),
    _scopes("no pattern", "", "float32", TypeError, "pattern | '' | must be a string | Write"),
    _string("a key", "compte=bf16", "policy | 'compte=bf16' | Cannot read | mean 'compute'"),
    _string("no compute", "output=float32", "policy | output | names no compute | add 'compute="),
    _string("a colon", "c=bf16,o:f32", f"policy | 'o:f32' | Cannot read | {SCHEMA}"),
    _string("twice", "c=bf16,compute=f16", "policy | c=bf16,comp | 'compute' twice | leave one"),
    _string("a dtype", "compute=bf17", "compute | 'bf17' | must be a dtype | 'bfloat16'"),
    _register(
        "an unknown policy", "mine", "fp23", ValueError, "'mine'", "'fp23'", NAMES, "mean 'FP32'"
    ),
    _register(
        "no policy", "mine", None, TypeError, "primitive 'mine'", "None of type", RULE, "CastPolicy"
    ),
    _register(
        "a priority",
        "mine",
        "KEEP",
        TypeError,
        "priority | 'high' | an int | default is 10",
        priority="high",
    ),
    _decision(
        "a name", TypeError, "Decision.policy | 'KEEP' | must be a CastPolicy | FP32", policy="KEEP"
    ),
    _decision(
        "no function to emit",
        TypeError,
        "Decision.emit | 'tanh' | must be a function | of the equation's operands",
        emit="tanh",
    ),
    _decision(
        "a policy and a function",
        ValueError,
        r"Decision | got both | a policy or a function to emit | Decision\(emit=function\)",
        policy=CastPolicy.FP32,
        emit=lax.exp,
    ),
    _decision(
        "an operand dtype of a policy",
        ValueError,
        "Decision.operand_dtype | CastPolicy.FP32 | belong to emit= | A policy sets the dtypes",
        policy=CastPolicy.FP32,
        operand_dtype="bfloat16",
    ),
]
