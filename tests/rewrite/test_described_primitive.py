"""A higher-order primitive is added by one description and one rewriting rule.

`flagged_call(flag, *xs; jaxpr)` runs its jaxpr on all operands but the flag. Nothing in the package
knows it; all that walk a program follow the description.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from jmp_autocast import BF16, autocast, check_numerics, compare, explain, op_stats, tune
from jmp_autocast.interpreters.compat import jaxpr_as_fun
from jmp_autocast.interpreters.primitives import structure
from jmp_autocast.interpreters.rewrite.rewriter import REWRITING_RULES
from jmp_autocast.interpreters.rewrite.structural import rebind_bodies
from tests.support.jaxprs import find, trace

flagged_call = Primitive("flagged_call")
flagged_call.multiple_results = True


def run(flag, *xs, jaxpr):
    return jaxpr_as_fun(jaxpr)(*xs)


flagged_call.def_impl(run)
flagged_call.def_abstract_eval(lambda flag, *xs, jaxpr: jaxpr.out_avals)
jax.interpreters.mlir.register_lowering(
    flagged_call, jax.interpreters.mlir.lower_fun(run, multiple_results=True)
)

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def bodies(eqn):
    operands = tuple(range(1, len(eqn.invars)))
    results = tuple(range(len(eqn.outvars)))
    jaxpr = eqn.params["jaxpr"]
    return (structure.Body(jaxpr, operands, results, takes_copies_at=len(operands)),)


def rebind(eqn, operands, jaxprs, copies):
    more = [copy.array for copy in copies[0]]
    return [*operands, *more], {"jaxpr": jaxprs[0]}


@pytest.fixture(autouse=True)
def described(monkeypatch):
    """The whole of what has to be told."""
    described = structure.Structure(bodies, rebind)
    monkeypatch.setitem(structure.STRUCTURES, "flagged_call", described)
    monkeypatch.setitem(REWRITING_RULES, "flagged_call", rebind_bodies)


def body(w, x):
    with jax.named_scope("inside"):
        return jnp.exp(x @ w)


def program(w, x):
    closed = jax.make_jaxpr(body)(w, x)
    (y,) = flagged_call.bind(jnp.bool_(True), w, x, jaxpr=closed)
    return jnp.tanh(y)


def test_autocast_lowers_what_is_inside():
    jaxpr = trace(autocast(program, policy=BF16), X, X)
    (call,) = find(jaxpr, "flagged_call")
    (dot,) = find(call.params["jaxpr"], "dot_general") or find(call.params["jaxpr"], "accumulate")
    assert [v.aval.dtype for v in dot.invars[:2]] == [jnp.bfloat16, jnp.bfloat16]
    out = jax.jit(autocast(program, policy=BF16))(X, X)
    np.testing.assert_allclose(out, program(X, X), rtol=2e-2)


def test_explain_lists_what_is_inside():
    report = explain(program, X, X, policy=BF16)
    by_name = {row.primitive: row for row in report.rows}
    assert by_name["dot_general"].operands == ("bfloat16", "bfloat16")
    assert by_name["dot_general"].depth == 1
    assert by_name["dot_general"].operand_inputs == ("1", "0")
    assert by_name["tanh"].operand_rows == (by_name["exp"].index,)
    assert report.totals.contraction_flops == report.totals.low_contraction_flops == 1024


def test_op_stats_counts_what_is_inside():
    counts = op_stats(autocast(program, policy=BF16), X, X)
    assert {count.primitive for count in counts} >= {"dot_general", "exp", "tanh"}


def test_check_numerics_finds_a_fault_inside():
    _, report = check_numerics(program, mode="collect")(X * 100, X * 100)
    assert (report.first.primitive, report.first.scope) == ("exp", "inside")


def test_compare_measures_what_is_inside():
    rows = compare(program, X, X, policy=BF16).rows
    assert {"dot_general", "exp"} <= {row.primitive for row in rows}


def test_tune_finds_a_culprit_inside():
    report = tune(program, X, X, policy=BF16, tolerance=1e-6)
    assert any("inside" in kept.scope for kept in report.kept)
