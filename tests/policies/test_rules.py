"""Rules: functions of an equation, registrations, and what beats what."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import (
    BF16,
    CastPolicy,
    Decision,
    Policy,
    autocast,
    explain,
    full_precision,
    register_rule,
)
from jmp_autocast.policies.patterns import match_depth
from tests.support.jaxprs import dot_dtypes, dtypes, trace
from tests.support.plans import DENORMAL, LOWEST
from tests.support.policy_programs import FULL, LOW, X, after_dot, io, rewritten


def views_of(fn, *args, primitive, **options):
    """What a rule for ``primitive`` is shown when ``fn`` is traced."""
    seen = []

    def record(eqn):
        seen.append(eqn)
        return CastPolicy.PROMOTE

    rewritten(fn, *args, policy=BF16.with_rules({primitive: record}), **options)
    return seen


def conv(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def of(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("fn", "args", "primitive", "depth", "flops"),
    [
        (jnp.matmul, (of(3, 5), of(5, 7)), "dot_general", 5, 2 * 3 * 5 * 7),
        (jnp.matmul, (of(2, 3, 5), of(2, 5, 7)), "dot_general", 5, 2 * 2 * 3 * 5 * 7),
        (conv, (of(1, 6, 6, 3), of(3, 3, 3, 8)), "conv_general_dilated", 27, 2 * 4 * 4 * 8 * 27),
        (
            lax.ragged_dot,
            (of(6, 5), of(2, 5, 7), np.array([2, 4], np.int32)),
            "ragged_dot_general",
            5,
            2 * 6 * 5 * 7,
        ),
        (lambda x: jnp.sum(x, axis=(0, 2)), (of(2, 3, 5),), "reduce_sum", 10, 3 * 10),
        (lambda x: jnp.max(x, axis=1), (of(2, 3, 5),), "reduce_max", 3, 10 * 3),
        (lambda x: lax.cumsum(x, axis=1), (of(2, 3),), "cumsum", 3, 6 * 3),
        (jnp.add, (of(2, 3), of(2, 3)), "add", 1, 6),
    ],
    ids=["matmul", "batched", "conv", "ragged_dot", "sum", "max", "cumsum", "add"],
)
def test_flops_and_reduction_depth(fn, args, primitive, depth, flops):
    (view,) = views_of(fn, *args, primitive=primitive)
    assert (view.reduction_depth, view.flops) == (depth, flops)


SIZE = 48


@pytest.mark.parametrize(
    ("fn", "shape", "primitive", "flops"),
    [
        (jnp.linalg.cholesky, (3, SIZE, SIZE), "cholesky", 3 * SIZE**3 / 3),
        (jax.scipy.linalg.lu_factor, (SIZE, SIZE), "lu", 2 * SIZE**3 / 3),
        (jnp.linalg.qr, (64, SIZE), "qr", 2 * 64 * SIZE**2 - 2 * SIZE**3 / 3),
        (jnp.linalg.eigh, (SIZE, SIZE), "eigh", 9 * SIZE**3),
        (lambda a: lax.linalg.triangular_solve(a, a), (SIZE, SIZE), "triangular_solve", SIZE**3),
    ],
)
def test_a_factorization_counts_what_its_algorithm_takes(fn, shape, primitive, flops):
    view, *_ = views_of(fn, of(*shape), primitive=primitive)
    assert view.flops == round(flops)


def test_the_fields_of_an_equation_view():
    def model(x, mask):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.clip(x, 0.0, 2.0) * mask.astype(jnp.float32), x * 3.0

    first, second = views_of(model, of(2, 3), np.ones((2, 3), bool), primitive="mul")
    assert first.primitive == "mul"
    assert first.operand_shapes == ((2, 3), (2, 3))
    assert first.result_shapes == ((2, 3),)
    assert first.operand_dtypes == (np.float32, np.float32)
    assert first.result_dtypes == (np.float32,)
    assert first.literals == (None, None)
    assert second.literals == (None, 3.0)
    assert first.scope == "outer/inner"
    assert first.compute_dtype == jnp.bfloat16
    assert "test_rules.py" in first.source
    assert "model" in first.source


def test_a_decision_with_an_output_dtype():
    decide = lambda eqn: Decision(policy=CastPolicy.FP32, output_dtype=eqn.compute_dtype)
    jaxpr = rewritten(after_dot(jnp.exp), X, policy=BF16.with_rules({"exp": decide}))
    assert io(jaxpr, "exp") == ((FULL,), (FULL,))
    assert dtypes(jaxpr.jaxpr.outvars) == (LOW,)
    widen = lambda eqn: Decision(policy=CastPolicy.LOWER_PRECISION_FP, output_dtype=jnp.float32)
    jaxpr = rewritten(jnp.matmul, X, X, policy=BF16.with_rules({"dot_general": widen}))
    assert dot_dtypes(jaxpr)[0][:2] == (LOW, LOW)
    assert dtypes(jaxpr.jaxpr.outvars) == (FULL,)


# --- rules in scopes --------------------------------------------------------------------------

KEEP, PROMOTE, FP32 = CastPolicy.KEEP, CastPolicy.PROMOTE, CastPolicy.FP32
LOWER = CastPolicy.LOWER_PRECISION_FP


def tanh_in(*scopes):
    """A tanh between two matmuls, in scopes."""

    def fn(x):
        h = x @ x
        with contextlib.ExitStack() as stack:
            for name in scopes:
                stack.enter_context(jax.named_scope(name))
            y = jnp.tanh(h)
        return y @ x

    return fn


@pytest.mark.parametrize(
    ("rules", "names", "expected"),
    [
        ([("net", FP32)], ["net"], FULL),
        ([("net", FP32)], ["net", "head"], FULL),
        ([("net", FP32)], ["other", "net"], LOW),
        ([("net", FP32)], [], LOW),
        ([("*/net", FP32)], ["other", "net", "head"], FULL),
        ([("*/net", FP32)], ["net"], FULL),
        ([("net", FP32), ("net/head", PROMOTE)], ["net", "head"], LOW),
        ([("net/head", PROMOTE), ("net", FP32)], ["net", "head"], LOW),
        ([("net", FP32), ("net/head", PROMOTE)], ["net", "tail"], FULL),
        ([("net", PROMOTE), ("*t", FP32)], ["net"], FULL),
        ([("*t", FP32), ("net", PROMOTE)], ["net"], LOW),
        ([("net", PROMOTE), ("*t", FP32), ("net", PROMOTE)], ["net"], LOW),
        ([("a[[]0]", FP32)], ["a[0]"], FULL),
        ([("a[[]0]", FP32)], ["a0"], LOW),
        ([("a[0]", FP32)], ["a0"], FULL),
    ],
)
@pytest.mark.filterwarnings("ignore:No equation of")  # a pattern that matches nothing
def test_rules_in_scopes(rules, names, expected):
    policy = BF16
    for scope, rule in rules:
        policy = policy.with_rules({"tanh": rule}, scope=scope)
    jaxpr = rewritten(tanh_in(*names), X, policy=policy)
    assert io(jaxpr, "tanh") == ((expected,), (expected,))


def test_what_beats_rules_in_scopes_and_what_they_beat():
    register_rule("tanh", "PROMOTE")
    policy = BF16.with_rules({"tanh": "PROMOTE"}).with_rules({"tanh": "FP32"}, scope="net")
    assert io(rewritten(tanh_in("net"), X, policy=policy), "tanh")[1] == (FULL,)
    low = BF16.with_rules({"tanh": "LOWER_PRECISION_FP"}, scope="net")
    assert io(rewritten(tanh_in("net"), X, policy=low), "tanh")[1] == (LOW,)
    # One that names the primitive beats one for all in its scope, and not one further in.
    scoped = low.with_rules({"*": "float32"}, scope="net")
    assert io(rewritten(tanh_in("net"), X, policy=scoped), "tanh")[1] == (LOW,)
    inside = low.with_rules({"*": "float32"}, scope="*/head")
    assert io(rewritten(tanh_in("net", "head"), X, policy=inside), "tanh")[1] == (FULL,)


HALF = "float16"
OF_ALL = {
    "a cast policy": ({"*": "FP32"}, [FULL, FULL]),
    "and one that is named": ({"*": "FP32", "tanh": "LOWER_PRECISION_FP"}, [FULL, LOW]),
    "the named one first": ({"tanh": "LOWER_PRECISION_FP", "*": "FP32"}, [FULL, LOW]),
    "a function": ({"*": lambda eqn: FP32 if eqn.primitive == "tanh" else LOWER}, [LOW, FULL]),
    "a dtype": ({"tanh": HALF}, [LOW, HALF]),
    "float32, but for one": ({"*": "float32", "tanh": "bfloat16"}, [FULL, LOW]),
    "a compute dtype beside a rule": ({"*": HALF, "tanh": "FP32"}, [HALF, FULL]),
    "a precision beside a rule": ({"*": "FP32", "dot_general": "highest"}, [FULL, FULL]),
}


@pytest.mark.parametrize(("rules", "expected"), OF_ALL.values(), ids=OF_ALL)
@pytest.mark.parametrize("scope", ["*", "*/head"])
def test_rules_for_all_primitives_and_dtypes_for_one(rules, expected, scope):
    """A loop, which takes no cast policy, is none of them."""

    def model(x):
        with jax.named_scope("head"):
            return lax.scan(lambda h, _: (jnp.tanh(h @ h), None), x, None, length=2)[0]

    jaxpr = rewritten(model, X, policy=BF16.with_rules(rules, scope=scope))
    assert [io(jaxpr, name)[0][0] for name in ("dot_general", "tanh")] == expected


def test_patterns_of_rules_that_match_nothing_are_reported():
    policy = BF16.with_rules({"tanh": "FP32"}, scope="net").with_rules({"exp": "KEEP"}, scope="no")
    report = explain(tanh_in("net"), X, policy=policy.with_rules({"*": "float16"}, scope="net"))
    assert report.totals.unmatched_scopes == ("no",)
    (row,) = [row for row in report.rows if row.primitive == "tanh"]
    assert (row.rule, row.reason, row.operands) == ("FP32", "FP32", (FULL,))


def test_rules_in_scopes_as_a_tuple():
    first, second = ("net", "tanh", KEEP), ("net", "tanh", FP32)
    policy = Policy("bfloat16", rules=(first, ("*", "tanh", PROMOTE), second))
    assert policy.rules == (("*", "tanh", PROMOTE), second)
    for wrong in ([first], (("net", "tanh"),), (["net", "tanh", KEEP],)):
        with pytest.raises(TypeError, match=r"rules must be a tuple of triples.*with_rules"):
            Policy(rules=wrong)
    with pytest.raises(TypeError, match="scope pattern must be a string"):
        BF16.with_rules({"tanh": "FP32"}, scope=3)


PATTERNS = ["net", "net/head", "*", "*/head", "n?t", "net*", "[n]et", "/net", "a[[]0]", "a[*]b"]


@pytest.mark.parametrize("names", [["net"], ["net", "head"], ["x", "head"], ["a[0]", "a*b"], []])
def test_single_paths_match_as_patterns_do(names):
    """They are looked up, since `tune` may give a rule to each scope of a large program."""
    for patterns in itertools.permutations(PATTERNS, 2):
        policy = BF16
        for pattern, rule in zip(patterns, (FP32, KEEP), strict=True):
            policy = policy.with_rules({"tanh": rule}, scope=pattern)
        found = [match_depth(pattern, names) for pattern in patterns]
        first, second = (-1 if depth is None else depth for depth in found)
        winner = KEEP if second >= first else FP32
        expected = (PROMOTE, "default") if found == [None] * 2 else (winner, "rules")
        assert policy.rule_for("tanh", names) == expected, patterns


# --- registrations and precedence -----------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "expected"),
    [([], LOW), (["FP32"], FULL), (["FP32", "PROMOTE"], LOW), (["PROMOTE", "FP32"], FULL)],
)
def test_the_latest_registration_wins(rules, expected):
    for name in rules:
        register_rule("tanh", name)
    assert io(rewritten(after_dot(lambda h: jnp.tanh(h) @ h.T), X), "tanh") == (
        (expected,),
        (expected,),
    )


def test_a_rule_of_the_users_own_promotes_where_no_product_follows():
    for policy, expected in ((BF16, FULL), (BF16.with_rules({"tanh": PROMOTE}), LOW)):
        jaxpr = trace(autocast(after_dot(jnp.tanh), policy=policy), X)
        assert io(jaxpr, "tanh") == ((expected,), (expected,))


def in_full_scope(fn):
    def scoped(x):
        h = x @ x
        with full_precision():
            return fn(h)

    return scoped


@pytest.mark.parametrize(
    ("fn", "rules", "registered", "primitive", "dtype"),
    [
        (in_full_scope(jnp.tanh), {"tanh": "LOWER_PRECISION_FP"}, {}, "tanh", FULL),
        (in_full_scope(jnp.tanh), {}, {"tanh": "LOWER_PRECISION_FP"}, "tanh", FULL),
        (after_dot(lambda h: jnp.sin(h.astype(LOW))), {"sin": "FP32"}, {}, "sin", FULL),
        (after_dot(lambda h: h + LOWEST), {"add": "LOWER_PRECISION_FP"}, {}, "add", LOW),
        (after_dot(jnp.tanh), {"tanh": "FP32"}, {"tanh": "PROMOTE"}, "tanh", FULL),
        (after_dot(lambda h: (h + LOWEST).astype(LOW) * LOWEST), {}, {}, "mul", LOW),
        (after_dot(lambda h: h + DENORMAL), {}, {"add": "LOWER_PRECISION_FP"}, "add", FULL),
        (after_dot(lambda h: h + DENORMAL), {}, {"add": "PROMOTE"}, "add", FULL),
        (after_dot(jnp.exp), {}, {"exp": "PROMOTE"}, "exp", LOW),
        (after_dot(lambda h: h + DENORMAL), {}, {}, "add", FULL),
    ],
    ids=[
        "scope_over_rule",
        "scope_over_registration",
        "rule_over_user_cast",
        "rule_over_guard",
        "rule_over_registration",
        "user_cast_over_guard",
        "guard_over_registration",
        "guard_in_registration",
        "registration_over_default",
        "guard_over_default",
    ],
)
def test_precedence(fn, rules, registered, primitive, dtype):
    for name, value in registered.items():
        register_rule(name, value)
    jaxpr = rewritten(fn, X, policy=BF16.with_rules(rules))
    assert io(jaxpr, primitive)[0][0] == dtype


def test_a_rule_promotes_beside_no_product():
    tanh = explain(after_dot(jnp.tanh), X, policy=BF16.with_rules({"tanh": "PROMOTE"})).rows[-1]
    assert (tanh.primitive, tanh.results) == ("tanh", ("bfloat16",))
