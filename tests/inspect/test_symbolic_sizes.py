"""Reports of programs with the symbolic lengths of `jax.export`, which count as 128."""

import json

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import BF16, autocast, explain, keep_less, op_stats
from jmp_autocast.inspect import audit, explain_kept


def attention(w, x):
    return jnp.sum(jax.nn.softmax(jnp.tanh(x @ w) @ x.T) @ x)


def recurrent(w, x):
    """A loop of a symbolic length."""

    def step(h, row):
        return jnp.tanh(h @ w + row), jnp.exp(-h)

    return jnp.sum(lax.scan(step, jnp.zeros(16, x.dtype), x)[1])


of_models = pytest.mark.parametrize("model", [attention, recurrent])

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
SYMBOLIC = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 16"), jnp.float32)
CONCRETE = jax.ShapeDtypeStruct((128, 16), jnp.float32)


def without_sizes(report):
    """The lines of a report, but those of sizes and of the roofline, which needs numbers."""
    return [
        line for line in str(report).splitlines() if line[:8].strip() not in ("sizes", "roofline")
    ]


def in_16_bits(x):
    return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)


@of_models
def test_explain_counts_them_and_says_so(model):
    found, concrete = (explain(model, W, x, policy=BF16) for x in (SYMBOLIC, CONCRETE))
    assert found.totals == concrete.totals
    assert found.by_dtype() == concrete.by_dtype()
    assert without_sizes(found) == without_sizes(concrete)
    assert "\nsizes       symbolic lengths count as 128\n" in str(found)
    assert "sizes " not in str(concrete)


@of_models
def test_reports_are_written(model):
    report = explain(model, W, SYMBOLIC, policy=BF16)
    assert report.roofline is None
    rows = json.loads(report.to_json())["rows"]
    assert ["rows", 16] in rows[0]["operand_shapes"] + rows[-1]["operand_shapes"]
    (product,) = (row for row in rows if row["operand_shapes"][1:] == [[16, 16]])
    assert product["flops"] == 2 * 128 * 16 * 16
    assert "symbolic lengths count as 128" in report.to_html()
    assert not report.difference(report).changes


@of_models
@pytest.mark.parametrize("residuals", ["declared", "recompute"])
def test_what_is_kept_is_shown_by_its_symbolic_shape(residuals, model):
    mixed = keep_less(autocast(model, policy=BF16), residuals=residuals)
    found, concrete = (explain_kept(mixed, W, x) for x in (SYMBOLIC, CONCRETE))
    assert found.summary == concrete.summary
    assert [a.nbytes for a in found.arrays] == [a.nbytes for a in concrete.arrays]
    assert str(found).replace("rows", "128").split() == str(concrete).split()
    assert found.to_html()


@of_models
def test_op_stats_counts_them(model):
    gradient = jax.grad(autocast(model, policy=BF16))
    found, concrete = (op_stats(gradient, W, x) for x in (SYMBOLIC, CONCRETE))
    assert found[:4] == concrete[:4]
    assert "dot_general" in str(found)


@of_models
def test_audit_reads_them(model):
    found, concrete = (audit(model, in_16_bits(W), in_16_bits(x)) for x in (SYMBOLIC, CONCRETE))
    assert str(found) == str(concrete)
    assert found.findings
    assert found.to_json()
