"""Two policies side by side: `Report.difference`, as data, as text and as a page."""

import json

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, explain

X = jax.ShapeDtypeStruct((8, 64), jnp.float32)
W = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}


def model(params, x):
    with jax.named_scope("<mlp> & co"):
        return jnp.mean(jnp.tanh(x @ params["w"]) @ params["w"])


@pytest.fixture(scope="module")
def difference():
    careful = explain(model, W, X, policy=BF16.with_level("tensor_cores"))
    return explain(model, W, X, policy=BF16).difference(careful)


def test_what_the_program_costs(difference):
    totals = difference.totals
    tanh = 8 * 64
    before, after = totals["FLOPs in bfloat16"]
    assert before - after == tanh
    before, after = totals["FLOPs in float32"]
    assert after - before == tanh
    # The hidden layer is cast up for the tanh and down after it.
    before, after = totals["casts"]
    assert after - before == 2
    # In float32 instead of bfloat16: two bytes more for each element of what is kept.
    before, after = totals["bytes kept for the backward pass"]
    assert after > before
    assert totals["16-bit copies of parameters"] == (1, 1)


def test_the_equations_that_differ(difference):
    (change,) = difference.changes
    assert (change.before.primitive, change.before.results) == ("tanh", ("bfloat16",))
    assert (change.after.primitive, change.after.results) == ("tanh", ("float32",))


def test_as_text(difference):
    lines = str(difference).splitlines()
    assert lines[0] == f"model: 1 of {difference.equations} equations differ"
    assert all(len(line) <= 100 for line in lines)
    (row,) = [line for line in lines if line.startswith("tanh")]
    assert "bf16 -> bf16" in row
    assert "f32 -> f32" in row


def test_as_data(difference):
    data = json.loads(difference.to_json())
    assert data["totals"]["16-bit copies of parameters"] == [1, 1]
    assert data["changes"][0]["after"]["reason"] == "PROMOTE_FULL"


def test_a_policy_beside_itself():
    report = explain(model, W, X, policy=BF16)
    same = report.difference(report)
    assert same.changes == ()
    assert all(before == after for before, after in same.totals.values())


def test_other_programs_are_refused():
    report = explain(model, W, X, policy=BF16)
    with pytest.raises(ValueError, match="are different programs"):
        report.difference(explain(jnp.tanh, X))
    with pytest.raises(TypeError, match=r"Report\.difference takes a Report"):
        report.difference("bfloat16")
