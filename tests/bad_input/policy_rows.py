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


def _retired(name, *parts):
    call = lambda w: Policy(**{name: ()})
    return Row("Policy", f"an option that is gone: {name}", call, TypeError, *parts)


def _gone(name, *parts):
    call = lambda w: getattr(w.policy, name)
    return Row("Policy", f"a method that is gone: {name}", call, AttributeError, *parts)


def _string(mistake, text, *parts):
    call = lambda w: autocast(loss, policy=text)
    return Row("autocast", f"policy: {mistake}", call, ValueError, *parts)


TYPE_ERRORS = {
    "Float8: no multiple": (
        lambda w: Float8(multiple=True),
        "Float8.multiple | True of type bool | must be an integer | such as 16",
    ),
    "in_compute_dtype: the result of a kernel": (
        lambda w: in_compute_dtype(np.ones((2, 2), np.float32)),
        r"in_compute_dtype | float32\[2,2\] | takes a function | in_compute_dtype\(my",
    ),
    "Policy: a mapping of rules": (
        lambda w: Policy(rules={"exp": CastPolicy.FP32}),
        r"rules | of type dict | must be a tuple of triples | with_rules\(",
    ),
    "Policy: no policy in the rules": (
        lambda w: Policy(rules=(("*", "exp", 3),)),
        f"rule for primitive 'exp' | got 3 of type int | {WHAT} | CastPolicy",
    ),
    "Policy: no mapping": (
        lambda w: w.policy.with_rules([("exp", "KEEP")]),
        r"rules | of type list | must be a mapping | with_rules\(\{'tanh'",
    ),
    "Policy: a function of nothing": (
        lambda w: w.policy.with_rules({"exp": lambda: CastPolicy.KEEP}),
        r"rule for primitive 'exp' | <lambda>\(\) | must take one argument | "
        "an EquationView",
    ),
    "Policy: a rule without a hash": (
        lambda w: w.policy.with_rules({"exp": Unhashable()}),
        "rule for primitive 'exp' | Unhashable object | must be hashable | Use a function",
    ),
    "Policy: None": (
        lambda w: w.policy.with_rules({"*": None}, scope="*/ln"),
        rf"primitive '\*' | None of type | {WHAT} | a name",
    ),
    "Policy: a class": (
        lambda w: w.policy.with_rules({"*": "float32"}, scope=nn.LayerNorm),
        r"scope pattern | LayerNorm'> | must be a string | Write one such as '\*/LayerNorm_\*'",
    ),
    "Policy: no pattern": (
        lambda w: w.policy.with_rules({"*": "float32"}, scope=""),
        "pattern | '' | must be a string | Write",
    ),
    "register_rule: no policy": (
        lambda w: register_rule("mine", None),
        "primitive 'mine'",
        "None of type",
        RULE,
        "CastPolicy",
    ),
    "Decision: a name": (
        lambda w: Decision(policy="KEEP"),
        "Decision.policy | 'KEEP' | must be a CastPolicy | FP32",
    ),
    "Decision: no function to emit": (
        lambda w: Decision(policy=CastPolicy.KEEP, emit="tanh"),
        "Decision.emit | 'tanh' | must be a function | of the equation's operands",
    ),
}

VALUE_ERRORS = {
    "autocast: a jmp policy with 16-bit parameters": (
        lambda w: autocast(loss, policy=jmp.get_policy("bfloat16")),
        "params | bfloat16 | must be float32 | cast once in the traced graph",
    ),
    "Policy: float64": (
        lambda w: Policy(compute_dtype=np.float64),
        "compute_dtype | float64 | must be float16 or bfloat16 | enabled=False",
    ),
    "Policy: int32": (
        lambda w: Policy(output_dtype="int32"),
        f"output_dtype | int32 | {FLOATS} | float32",
    ),
    "Policy: matmul": (
        lambda w: Policy(matmul="float9"),
        "matmul | 'float9' | 'float8', 'float8_row', got | mean",
    ),
    "Policy: a primitive like no other": (
        lambda w: w.policy.with_rules({"qqqq": "KEEP"}),
        r"with_rules | 'qqqq' | Unknown primitive | For a primitive of another",
    ),
    "Policy: an unknown primitive": (
        lambda w: w.policy.with_rules({"dot_genral": "KEEP"}),
        "with_rules | 'dot_genral' | Unknown primitive | mean 'dot_general'.*register_rule",
    ),
    "Policy: an unknown policy": (
        lambda w: w.policy.with_rules({"exp": "promot"}),
        f"primitive 'exp' | 'promot' | a cast policy .{NAMES} | mean 'PROMOTE'",
    ),
    "Policy: a structural primitive": (
        lambda w: w.policy.with_rules({"scan": "KEEP"}),
        "Primitive | 'scan' | is structural | scope=",
    ),
    "Policy: a pattern for a primitive": (
        lambda w: w.policy.with_rules({"*/ln": "float32"}),
        r"with_rules | '\*/ln' | Unknown primitive | by scope=: with_rules\(\{'\*': ...\}",
    ),
    "Policy: 8 bits for tanh": (
        lambda w: w.policy.with_rules({"tanh": "float8"}),
        "'tanh' | 8 bits | is none | 'float8' to '\\*'",
    ),
    "Policy: a precision for tanh": (
        lambda w: w.policy.with_rules({"tanh": "high"}),
        "'tanh' | 'high' | of products | to '\\*'",
    ),
    "register_rule: an unknown policy": (
        lambda w: register_rule("mine", "fp23"),
        "'mine'",
        "'fp23'",
        NAMES,
        "mean 'FP32'",
    ),
    "Decision: a policy and a function": (
        lambda w: Decision(policy=CastPolicy.FP32, emit=lax.exp),
        r"Decision | got both | a policy or a function to emit | Decision\(emit=function\)",
    ),
    "Decision: an operand dtype of a policy": (
        lambda w: Decision(policy=CastPolicy.FP32, operand_dtype="bfloat16"),
        "Decision.operand_dtype | CastPolicy.FP32 | belong to emit= | A policy sets the dtypes",
    ),
}

ROWS = [
    *rows(TypeError, TYPE_ERRORS),
    *rows(ValueError, VALUE_ERRORS),
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
    _string("a key", "compte=bf16", "policy | 'compte=bf16' | Cannot read | mean 'compute'"),
    _string("no compute", "output=float32", "policy | output | names no compute | add 'compute="),
    _string("a colon", "c=bf16,o:f32", f"policy | 'o:f32' | Cannot read | {SCHEMA}"),
    _string("twice", "c=bf16,compute=f16", "policy | c=bf16,comp | 'compute' twice | leave one"),
    _string("a dtype", "compute=bf17", "compute | 'bf17' | must be a dtype | 'bfloat16'"),
]
