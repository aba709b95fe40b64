"""`explain` reports the dtypes, reasons, casts and totals of `autocast`."""

import collections
import dataclasses
import json
import pathlib
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, CastPolicy, autocast, explain, full_precision
from jmp_autocast.inspect.report.jaxprs import count_casts
from jmp_autocast.inspect.report.reasons import explanations
from jmp_autocast.interpreters.compat import body_of
from jmp_autocast.interpreters.compat.registration import define_primitive
from jmp_autocast.interpreters.plan.data import ReasonCode
from jmp_autocast.interpreters.primitives.held_contraction import contraction_in
from jmp_autocast.interpreters.primitives.structure import bodies
from jmp_autocast.policies import DATA_MOVEMENT, STRUCTURAL
from tests.fuzz.program import jax_settings
from tests.fuzz.strategies import cases, examples
from tests.support.jaxprs import trace

# Rewriting adds or removes these: casts, views, copies, and the movements of copies.
ADDED = DATA_MOVEMENT | STRUCTURAL | {"convert_element_type", "optimization_barrier", "copy"}


def dtypes_of(atoms):
    return tuple(str(getattr(v.aval, "dtype", None)) for v in atoms)


def reached(jaxpr, skips):
    """The ids of the equations that the results depend on, without operands in `skips`."""
    live, found = set(map(id, jaxpr.outvars)), set()
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in live for v in eqn.outvars):
            found.add(id(eqn))
            live.update(id(v) for v in eqn.invars if not skips(eqn, v))
    return found


def computed_for_picks(jaxpr):
    """The equations that are recomputed for picked elements alone."""
    makers = {id(v): eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    picks = ("pick", "gather", "reshape")

    def is_value_of_pick(eqn, v):
        is_view = eqn.primitive.name == "source_view" and v is eqn.invars[1]
        return is_view and makers.get(id(eqn.invars[0])) in picks

    return reached(jaxpr, lambda eqn, v: False) - reached(jaxpr, is_value_of_pick)


def emitted(jaxpr):
    """(primitive, operand dtypes, result dtypes) of the equations that compute."""
    again = computed_for_picks(body_of(jaxpr))
    casts = {v for e in body_of(jaxpr).eqns if e.primitive.name in ADDED for v in e.outvars}
    for eqn in body_of(jaxpr).eqns:
        # Beside a pick the rounding of a cast is an equation by itself.
        is_of_cast = eqn.primitive.name == "reduce_precision" and eqn.invars[0] in casts
        if id(eqn) in again or is_of_cast:
            continue
        if eqn.primitive.name == "accumulate":
            contraction = contraction_in(eqn)
            operands = dtypes_of(eqn.invars)[: len(contraction.invars)]
            yield contraction.primitive.name, operands, dtypes_of(eqn.outvars)
            continue
        if eqn.primitive.name not in ADDED and eqn.primitive.name != "source_view":
            yield eqn.primitive.name, dtypes_of(eqn.invars), dtypes_of(eqn.outvars)
        for inner in (body.jaxpr for body in bodies(eqn)):
            yield from emitted(inner)


def explained(report):
    for row in report.rows:
        if row.primitive not in ADDED and row.primitive != "source_view":
            # A stream is computed in float32, and the cast that rounds it is an equation by itself.
            is_rounded = row.cause == "all summands were rounded before"
            yield row.primitive, row.operands, row.operands[:1] if is_rounded else row.results


def assert_rows_are_what_runs(wrapper, *args):
    report = explain(wrapper, *args)
    found = collections.Counter(explained(report))
    assert found == collections.Counter(emitted(trace(wrapper, *args)))
    return report


W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


def attention(params, x):
    scores = jnp.where(jnp.tri(8, dtype=bool), x @ params["w"] @ x.T, -1e30)
    return jnp.mean(jnp.log(1 + jax.nn.softmax(scores) @ x + 10.0) ** 2)


def scanned(params, x):
    def layer(h, w):
        return jnp.tanh(h @ w) + h, jnp.sum(h)

    return lax.scan(layer, x, jnp.stack([params["w"]] * 5))


def branched(params, x):
    return lax.cond(jnp.sum(x) > 0, lambda x: x @ params["w"], lambda x: jnp.exp(x), x)


def looped(params, x):
    return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: jnp.abs(c @ params["w"]) + 1, x)


def checkpointed(params, x):
    return jax.checkpoint(lambda w, x: jnp.sin(x @ w))(params["w"], x)


FUNCTIONS = {f.__name__: f for f in (attention, scanned, branched, looped, checkpointed)}
FUNCTIONS["gradient"] = jax.grad(attention)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["tensor_cores", "o1", "compute"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_dtypes_are_those_of_the_program_that_runs(name, level, dtype):
    policy = dataclasses.replace(BF16 if dtype == "bfloat16" else FP16, level=level)
    assert_rows_are_what_runs(autocast(FUNCTIONS[name], policy=policy), {"w": W}, X)


@examples(30)
@hypothesis.given(cases(without=["autocast("]))
def test_the_dtypes_are_those_of_random_programs(case):
    with jax_settings(case.program.x64):
        assert_rows_are_what_runs(case.cast, *case.args)


def test_loops_are_multiplied_by_their_length():
    report = explain(scanned, {"w": W}, X, policy=BF16)
    (row,) = (row for row in report.rows if row.primitive == "dot_general")
    assert (row.times, row.flops) == (5, 5 * 2 * 8 * 8 * 8)
    assert (row.depth, row.operands) == (1, ("bfloat16", "bfloat16"))
    assert report.totals.contraction_flops == row.flops


def test_a_row_says_where_and_why():
    def f(x):
        with jax.named_scope("block"), full_precision():
            y = x @ W
        return jnp.exp(y) @ W

    first, exp, second = explain(f, X, policy=BF16).rows
    assert first.scope.startswith("block/")
    assert "test_explain.py" in first.source
    assert (first.operands, first.reason) == (("float32", "float32"), "SCOPE")
    assert (exp.rule, exp.reason, exp.operands) == ("FP32", "FP32", ("float32",))
    assert (second.rule, second.reason) == ("dot_rule", "LOWER_PRECISION")
    assert (second.declared_operands, second.operands) == (("float32",) * 2, ("bfloat16",) * 2)
    assert second.nbytes == 2 * (64 + 64 + 64)


def test_a_rule_function_is_named():
    def careful(eqn):
        return CastPolicy.FP32

    (row,) = explain(jnp.sin, X, policy=BF16.with_rules({"sin": careful})).rows
    assert (row.rule, row.reason) == ("careful", "FP32")


@pytest.mark.filterwarnings("ignore:No equation of")
def test_totals():
    policy = BF16.with_rules({"*": "float32"}, scope="*/norm").with_rules(
        {"*": "float32"}, scope="*/missing"
    )

    def f(params, x):
        with jax.named_scope("net"), jax.named_scope("norm"):
            x = x @ params["a"]
        return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c + 1, x @ params["b"])

    totals = explain(f, {"a": W, "b": W, "unused": W}, X, policy=policy).totals
    assert (totals.parameters, totals.cast_parameters) == (3, 1)
    assert totals.low_share == 0.5
    assert totals.unmatched_scopes == ("*/missing",)
    assert totals.loops_of_unknown_length == 1
    assert totals.unknown == ()
    casts = count_casts(trace(autocast(f, policy=policy), {"a": W, "b": W, "unused": W}, X))
    assert totals.casts == casts
    assert (casts.down, casts.down_nbytes, casts.up) == (2, 6 * (64 + 64), 1)


CALLS = {
    "inline": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda *xs: lax.cond(xs[-1][0, 0] > 0, f, f, *xs),
}


@pytest.mark.parametrize("wrap", CALLS.values(), ids=CALLS)
def test_copies_of_parameters_that_are_made_in_calls_count(wrap):
    f = wrap(lambda params, x: jnp.tanh(x @ params["a"]) @ params["a"].T + params["b"])
    totals = explain(f, {"a": W, "b": W[0]}, X, policy=BF16).totals
    assert (totals.parameters, totals.cast_parameters) == (2, 1)


def test_casts_in_a_loop_count_each_time():
    def f(x):
        return lax.scan(lambda c, _: (c.astype(jnp.float16).astype(jnp.float32), None), x, None, 7)

    casts = count_casts(trace(f, X))
    assert (casts.down, casts.up, casts.up_nbytes) == (7, 7, 7 * 6 * 64)


def test_json_holds_the_rows_and_totals(tmp_path):
    report = explain(scanned, {"w": W}, X, policy=BF16)
    path = tmp_path / "report.json"
    text = report.to_json(path)
    assert path.read_text(encoding="utf-8") == text
    data = json.loads(text)
    assert len(data["rows"]) == data["totals"]["equations"] == len(report.rows)
    assert data["totals"]["low_share"] == 1.0
    assert data["rows"][0]["primitive"] == report.rows[0].primitive


def test_the_page_on_reasons_says_of_every_code_what_the_report_says():
    page = pathlib.Path(__file__).parents[2] / "docs" / "reasons.md"
    row = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) *\|$", re.MULTILINE)
    listed = {code: texts for code, *texts in row.findall(page.read_text(encoding="utf-8"))}
    said = {code.value: [e.says, e.otherwise] for code, e in explanations().items()}
    assert listed == said
    assert set(explanations()) == set(ReasonCode)


def test_primitives_without_a_rule_are_named():
    mystery = define_primitive("mystery", aval=lambda x: x)
    fn = lambda x: mystery.bind(x @ x)
    for program in (fn, autocast(fn, policy=BF16), jax.jit(autocast(fn, policy=BF16))):
        report = explain(program, X)
        assert report.totals.unknown == ("mystery",)
        said = "no rule for mystery: operands keep their declared dtypes; register_rule gives one"
        assert said in str(report)


def test_a_matmul_that_returns_its_accumulator_counts_as_what_it_returns():
    loss = autocast(lambda params, x: jnp.sum(jnp.exp(x @ params["w"])), policy=BF16)
    rows = explain(jax.grad(loss), {"w": W}, X).rows
    dots = {
        r.results: (r.operands, r.flops, r.nbytes) for r in rows if r.primitive == "dot_general"
    }
    low = ("bfloat16", "bfloat16")
    assert dots == {
        ("bfloat16",): (low, 1024, 2 * (64 + 64 + 64)),
        ("float32",): (low, 1024, 2 * (64 + 64) + 4 * 64),
    }
    assert "accumulate" not in {row.primitive for row in rows}


WAVES = np.diff(np.eye(8, dtype=np.float32), axis=0)
GUARDED = {
    "cannot pay": (lambda w, x: x[:, :3] @ w[:3], BF16, "at most 4 elements are summed"),
    "differences": (lambda w, x: WAVES @ (x @ w), BF16, "add up to 0"),
    "positions": (lambda w, x: jnp.arange(64.0).reshape(8, 8) @ w, BF16, "evenly spaced positions"),
    "a request": (lambda w, x: jnp.dot(x, w, precision="highest"), BF16, "precision="),
    "a derivative": (lambda w, x: ((x @ w) / (x @ x)) @ w, FP16, "its derivative may leave"),
    "range": (lambda w, x: jnp.where(x > 0, x @ w, -1e9) @ w, FP16, "has no float16 value"),
    "far": (lambda w, x: (x @ w + 1000.0) @ w, BF16, "takes digits of what it meets"),
}


@pytest.mark.parametrize("kind", GUARDED)
def test_a_cause_says_what_a_guard_sees(kind):
    fn, policy, words = GUARDED[kind]
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert any(words in row.cause for row in explain(fn, x, x, policy=policy).rows)
