"""Equations that look alike share one plan; those that differ in what counts do not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from jmp_autocast import BF16, Policy, autocast, full_precision
from jmp_autocast.interpreters.compat import body_of
from jmp_autocast.interpreters.plan import constant_range, planner
from jmp_autocast.interpreters.plan.data import ReasonCode
from jmp_autocast.interpreters.plan.planner import kind_of
from jmp_autocast.interpreters.rewrite.closures import ClosedOver
from tests.support.jaxprs import find, trace
from tests.support.plans import FULL, LOW, LOWEST, all_equations, low, plan_of

X = np.ones((8, 8), np.float32)
ROW = np.ones(8, np.float32)
SCOPES = {"head": "float32", "tail": "float32"}


def plans_of(primitives, fn, *args, policy=BF16):
    """The plan of each equation of the primitives, in program order."""
    plan = plan_of(fn, *args, policy=policy)
    return [p for eqn, p in all_equations(plan) if eqn.primitive.name in primitives.split()]


def chain(length):
    def fn(w, x):
        for _ in range(length):
            x = jnp.sin(jnp.tanh(x @ w) * 0.5 + 1.0)
        return x

    return fn


def test_a_longer_chain_has_no_more_plans():
    short, long = plan_of(chain(4), X, X), plan_of(chain(40), X, X)
    assert len(long.equations) == 10 * len(short.equations)
    assert len(set(map(id, long.equations))) == len(set(map(id, short.equations)))


def in_scopes(x):
    with jax.named_scope("head"):
        y = jnp.tanh(x @ x)
    with jax.named_scope("tail"):
        return y, jnp.tanh(x @ x)


def in_and_out_of_full_precision(x):
    h = x @ x
    with full_precision():
        y = jnp.tanh(h)
    return y, jnp.tanh(h)


def with_two_readers(x):
    h = x @ x
    return jnp.exp(h * 2), (h * 2) @ x


def contract(a, b):
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())))


DIFFERENT = {
    # What differs: (primitives, function, arguments, dtype of each result).
    "primitive": ("sin exp", low(lambda h: (jnp.sin(h), jnp.exp(h))), (X,), [LOW, FULL]),
    "parameters": ("integer_pow", low(lambda h: (h**-1, h**3)), (X,), [FULL, LOW]),
    "shape_of_an_operand": (
        "dot_general",
        lambda v, m: (contract(v + v, v + v), contract(v + v, m + m)),
        (ROW, X),
        [FULL, LOW],
    ),
    "dtype_of_an_operand": ("sin", low(lambda h, y: (jnp.sin(h), jnp.sin(y))), (X, X), [LOW, FULL]),
    "literal": ("mul", low(lambda h: (h * 1e-30, h * (1 - 1e-7), h * 2)), (X,), [LOW, FULL, LOW]),
    "scope": ("tanh", in_and_out_of_full_precision, (X,), [FULL, LOW]),
    "reader": ("mul", with_two_readers, (X,), [FULL, LOW]),
}


@pytest.mark.parametrize(("primitives", "fn", "args", "dtypes"), DIFFERENT.values(), ids=DIFFERENT)
def test_equations_that_differ_are_told_apart(primitives, fn, args, dtypes):
    assert [p.results[0].dtype for p in plans_of(primitives, fn, *args)] == dtypes


add, multiply, contraction = jax.jit(jnp.add), jax.jit(jnp.multiply), jax.jit(jnp.matmul)

CALLS = {
    # What differs in the operands of two calls: (function, arguments, dtype of each result).
    "leaf": (lambda x: (add(x @ x, x), add(x @ x, jnp.asarray(X))), [FULL, LOW]),
    "literal": (lambda x: (multiply(x @ x, 1 - 1e-7), multiply(x @ x, 2.0)), [FULL, LOW]),
    "range_of_a_constant": (
        lambda x: (add(x @ x, jnp.asarray(X * LOWEST)), add(x @ x, jnp.asarray(X))),
        [FULL, LOW],
    ),
    "coordinates": (
        lambda x: (contraction(lax.iota(jnp.float32, 8), x), contraction(x[0], x)),
        [FULL, LOW],
    ),
}


@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize(("fn", "expected"), CALLS.values(), ids=CALLS)
def test_calls_of_one_jaxpr_that_differ_are_told_apart(fn, expected):
    closed = trace(fn, X)
    calls = [e.params["jaxpr"] for e in find(closed, "jit")]
    assert len(calls) >= 2
    assert len(set(map(id, calls))) == 1
    assert [state.dtype for state in plan_of(fn, X).outputs] == expected
    emitted = trace(autocast(fn, policy=BF16, output_dtype="computed"), X)
    assert [aval.dtype for aval in emitted.out_avals] == expected


def test_the_scope_that_is_the_reason_is_the_equations_own():
    policy = Policy("bfloat16", rules=tuple((scope, "*", dtype) for scope, dtype in SCOPES.items()))
    plans = plans_of("tanh", in_scopes, X, policy=policy)
    assert [p.reason.code for p in plans] == [ReasonCode.SCOPE, ReasonCode.SCOPE]
    assert [p.reason.cause for p in plans] == ["scope 'head'", "scope 'tail'"]


def test_an_array_is_not_searched_to_see_whether_equations_are_alike(monkeypatch):
    monkeypatch.setattr(constant_range, "_MAX_SIZE", 0)  # as if it were large: no guard searches it
    monkeypatch.setattr(constant_range, "_range_of", lambda *array: pytest.fail("searched"))
    weight = jnp.asarray(X)
    plans = plans_of("dot_general", lambda x: (x @ weight, x @ weight), X)
    assert [p.results[0].dtype for p in plans] == [LOW, LOW]


# JAX insists on a hash of the parameters of every primitive but those of a few names.
unhashable = Primitive("custom_lin")
unhashable.def_abstract_eval(lambda x, *, sizes: x)


def test_an_equation_whose_parameter_has_no_hash_is_planned_by_itself():
    def fn(x):
        return unhashable.bind(x, sizes=[1]), unhashable.bind(x, sizes=[1])

    plans = plans_of("custom_lin", fn, X)
    assert [p.reason.code for p in plans] == [ReasonCode.KEEP, ReasonCode.KEEP]
    assert plans[0] is not plans[1]


def test_scalars_that_are_equal_are_told_apart_by_their_bits():
    """What is bound again is cached by its scalars, and 0.0 equals -0.0."""
    fn = autocast(lambda x: (x @ x * 0.0, x @ x * -0.0), policy=BF16)
    assert [bool(jnp.signbit(y).any()) for y in jax.jit(fn)(X)] == [False, True]


def test_leaves_are_alike_whatever_array_they_are():
    first, second = plans_of("sin", lambda x, y: (lax.sin(x), lax.sin(y)), X, X)
    assert first is second


def test_bodies_that_are_traced_anew_at_each_call_are_planned_once(monkeypatch):
    planned = []
    needs_of = planner.needs_of
    monkeypatch.setattr(planner, "needs_of", lambda *args: planned.append(args) or needs_of(*args))

    def relus(count):
        def fn(x):
            for _ in range(count):
                x = jax.nn.relu6(x @ x)
            return x

        planned.clear()
        plan = plan_of(fn, X)
        return plan, len(planned)

    (_, few), (plan, many) = relus(3), relus(12)
    assert many == few
    # Each has a plan of its own jaxpr, whose equations know their own source lines.
    calls = [(e, p) for e, p in zip(plan.jaxpr.eqns, plan.equations, strict=True) if p.inner]
    assert len(calls) == 12
    for eqn, equation in calls:
        assert equation.inner[0].jaxpr is body_of(eqn.params["call_jaxpr"])


KINDS = {
    "literal": (lambda x: x * 2, lambda x: x * 3),
    "operands": (lambda x, y: x - y, lambda x, y: y - x),
    "output": (lambda x: (x * 2, x), lambda x: (x, x * 2)),
    "scope": (lambda x: x * 2, jax.named_scope("head")(lambda x: x * 2)),
    "parameter": (lambda x: x.sum(0), lambda x: x.sum(1)),
    "type": (lambda x: x * 2, lambda x: x[:2] * 2),
}


@pytest.mark.parametrize(("first", "second"), KINDS.values(), ids=KINDS)
def test_jaxprs_that_differ_are_of_different_kinds(first, second):
    args = (X, X) if first.__code__.co_argcount == 2 else (X,)
    kinds = [kind_of(jax.make_jaxpr(lambda *xs, f=f: f(*xs))(*args)) for f in (first, second)]
    again = kind_of(jax.make_jaxpr(lambda *xs: first(*xs))(*args))
    assert kinds[0] is not None
    assert kinds[0] == again
    assert kinds[0] != kinds[1]


def test_a_long_jaxpr_and_one_with_constants_have_no_kind():
    weight = jnp.asarray(X)
    assert kind_of(jax.make_jaxpr(chain(40))(X, X)) is None
    assert kind_of(jax.make_jaxpr(lambda x: x @ weight)(X)) is None


def test_an_equation_is_planned_once(monkeypatch):
    planned = []
    shared = planner.Planner.plan_at

    def counted(self, at):
        planned.append(at.name)
        return shared(self, at)

    monkeypatch.setattr(planner.Planner, "plan_at", counted)

    def fn(x):
        for _ in range(20):
            x = jnp.tanh(x @ x)
        return jnp.exp(y := x * 2) * y  # both ask for the product in float32

    plan = plan_of(fn, X)
    assert plan.equations[-3].reason.code is ReasonCode.FEEDER
    assert len(planned) == len(plan.equations)


def test_shared_calls_are_looked_at_once(monkeypatch):
    """Twelve functions that call the one below twice have 8,191 call sites."""
    seen = []
    found = ClosedOver._found

    def counted(*args):
        seen.append(args)
        return found(*args)

    monkeypatch.setattr(ClosedOver, "_found", counted)
    twice = jax.jit(lambda x: jnp.sin(x @ X))
    for _ in range(12):
        twice = jax.jit(functools.partial(lambda f, x: f(x) + f(-x), twice))
    jax.make_jaxpr(autocast(twice, jnp.bfloat16))(X)
    assert 12 <= len(seen) < 60


def test_no_text_of_a_function_is_made_to_wrap_it():
    """The `repr` of a function that holds two others is exponential in the depth."""

    class Silent:
        def __call__(self, x):
            return x

        def __repr__(self):
            raise AssertionError("its repr is asked for")

    autocast(Silent(), jnp.bfloat16)
