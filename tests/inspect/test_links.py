"""The links between the rows of a report: the producers of operands."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_autocast import BF16, autocast, explain

W = np.ones((8, 8), np.float32)
X = np.ones((8, 8), np.float32)


def report_of(fn, *args, policy=BF16):
    return explain(fn, *(args or (W, X)), policy=policy).rows


def find(rows, primitive, nth=0):
    return [row for row in rows if row.primitive == primitive][nth]


def made_by(rows, row, operand=0):
    """The primitive of the producer of an operand."""
    made = row.operand_rows[operand]
    return None if made is None else rows[made].primitive


def test_rows_are_numbered_and_inputs_are_named():
    def f(params, x, scale):
        return jnp.tanh(x @ params["w"]) * scale + 2.0

    rows = report_of(f, {"w": W}, X, np.float32(3))
    assert [row.index for row in rows] == list(range(len(rows)))
    dot, tanh, mul, add = (find(rows, p) for p in ("dot_general", "tanh", "mul", "add"))
    assert dot.operand_inputs == ("1", "0/w")
    assert dot.operand_sources == ("data", "param")
    assert dot.operand_rows == (None, None)
    assert tanh.operand_rows == (dot.index,)
    assert tanh.operand_sources == tanh.operand_inputs == ("",)
    assert (mul.operand_rows, mul.operand_inputs) == ((tanh.index, None), ("", "2"))
    assert (add.operand_rows[0], add.operand_sources) == (mul.index, ("", "literal"))


def test_across_the_boundary_of_a_call():
    @jax.jit
    def inner(x, w):
        return jnp.sin(x), w, jnp.float32(3)

    def f(w, x):
        a, b, c = inner(x @ w, w)
        return jnp.cos(a), jnp.exp(b), jnp.log(c)

    rows = report_of(f)
    assert made_by(rows, find(rows, "sin")) == "dot_general"
    assert made_by(rows, find(rows, "cos")) == "sin"
    assert find(rows, "exp").operand_inputs == ("0",)  # through the call, as it was
    assert made_by(rows, find(rows, "log")) == "jit"  # a constant of the call


def test_across_the_boundaries_of_a_scan():
    def f(w, x):
        def step(carry, row):
            carry = jnp.tanh(row @ w) + carry
            return carry, jnp.sin(carry)

        end, stacked = lax.scan(step, jnp.exp(x[0]), x @ w)
        return jnp.cos(end), jnp.log(stacked)

    rows = report_of(f)
    outer, inner = (find(rows, "dot_general", i) for i in (0, 1))
    assert inner.operand_rows == (outer.index, None)  # a slice of a value from before the loop
    assert inner.operand_inputs == ("", "0")
    add, scan = find(rows, "add"), find(rows, "scan")
    assert scan.index in add.operand_rows  # the carry
    assert made_by(rows, find(rows, "cos")) == "scan"
    assert made_by(rows, find(rows, "log")) == "sin"
    assert scan.reason in ("CARRY", "CARRY_ACCUMULATOR")


def test_across_the_boundaries_of_a_while_loop():
    def f(w, x):
        def body(carry):
            i, h = carry
            return i + 1, jnp.sin(h @ w)

        return jnp.cos(lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.exp(x)))[1])

    rows = report_of(f)
    loop = find(rows, "while")
    assert find(rows, "lt").operand_rows[0] == loop.index
    assert find(rows, "dot_general").operand_rows == (loop.index, None)
    assert made_by(rows, find(rows, "cos")) == "while"


def test_the_predicate_of_a_while_loop_that_runs_reads_what_the_loop_carries():
    def f(w):
        return lax.while_loop(lambda h: jnp.sum(h) < 3, lambda h: jnp.sin(h @ w), w)

    for rows in (report_of(f, W), explain(jax.jit(autocast(f, policy=BF16)), W).rows):
        total = find(rows, "reduce_sum")
        assert total.operand_rows == (find(rows, "while").index,)
        assert total.operand_sources == ("",)


def test_across_the_boundaries_of_a_cond():
    def f(w, x):
        y = x @ w
        z = lax.cond(jnp.sum(x) > 0, lambda y: y @ w, lambda y: jnp.exp(y), y)
        return jnp.sin(z)

    rows = report_of(f)
    first, second = (find(rows, "dot_general", i) for i in (0, 1))
    assert second.operand_rows == (first.index, None)
    assert find(rows, "exp").operand_rows == (first.index,)
    cond = find(rows, "cond")
    assert find(rows, "sin").operand_rows == (cond.index,)
    assert cond.reason == "BRANCH_JOIN"


def test_a_body_that_is_called_twice_has_two_sets_of_rows():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    rows = report_of(lambda w, x: layer(layer(x, w), w))
    one, two = (find(rows, "dot_general", i) for i in (0, 1))
    assert [row.inner for row in rows] == [2, 0, 0, 2, 0, 0]
    assert one.operand_inputs == ("1", "0")
    assert two.operand_rows == (find(rows, "tanh").index, None)


def test_a_reason_names_the_operands_that_decided():
    rows = report_of(lambda w, x: jnp.tanh(x @ w + 1.0) @ w)
    dot, add, tanh = (find(rows, p) for p in ("dot_general", "add", "tanh"))
    assert (dot.reason, dot.cause_operands) == ("LOWER_PRECISION", ())
    assert (tanh.reason, tanh.cause_operands, tanh.operand_rows) == (
        "PROMOTE_LOW",
        (0,),
        (add.index,),
    )
    assert add.operand_rows[add.cause_operands[0]] == dot.index


def attention(w, x):
    return jax.nn.softmax(x @ w @ (x @ w).T / jnp.sqrt(4.0)) @ (x @ w)


def gpt_block(w, x):
    def norm(h):
        mean, var = jnp.mean(h, -1, keepdims=True), jnp.var(h, -1, keepdims=True)
        return (h - mean) * lax.rsqrt(var + 1e-5)

    h = x + attention(w, norm(x)) @ w
    return h + jax.nn.gelu(norm(h) @ w) @ w
