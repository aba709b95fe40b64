"""`explain_compiled`: its report, and what differs between the plan and what was made of it."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jmp_autocast import BF16, autocast, cpu_kernels, explain, explain_compiled, full_precision
from jmp_autocast.inspect import (
    CompiledCollective,
    CompiledProduct,
    Deviation,
    PlannedAndMade,
)
from jmp_autocast.inspect.compiled.against_plan import compared
from jmp_autocast.inspect.compiled.arithmetic import flops_in
from jmp_autocast.inspect.compiled.hlo import parse
from tests.support.hlo_texts import TEXTS, module_of


def kept(name):
    return explain_compiled(TEXTS / f"{name}.txt")


# --- the report ---------------------------------------------------------------------------------


def test_a_sharded_step_of_a_tpu():
    """Parameters are gathered in bfloat16, gradients are added up in float32."""
    report = kept("tpu_sharded_step")
    wires = {(each.kind, each.dtype) for each in report.collectives}
    assert {("all-gather", "bfloat16"), ("all-reduce", "float32")} <= wires
    assert sum(c.nbytes for c in report.collectives if c.dtype == "float32") == 6291456
    assert report.share("bfloat16") == 1.0
    assert report.product_flops == 3 * 2 * 128 * 1024 * 1024
    assert [(cast.operand, cast.result) for cast in report.casts] == [("float32", "bfloat16")]
    text = str(report)
    assert "Collectives" in text
    assert "all-gather bfloat16" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_kernel_whose_inside_is_not_shown_counts_as_nothing_else():
    report = kept("tpu_splash_attention")
    assert not report.products
    assert len(report.calls) == 2
    assert report.opaque_share > 0.5
    assert "splash_mha_fwd_residuals" in str(report)
    assert "kernels whose inside is not shown" in str(report)
    assert report.summary == "jit_att on tpu: no products; 13 kernels, 0 only cast"


def test_a_report_is_written_as_every_other_one(tmp_path):
    report = kept("gpu_cudnn")
    data = json.loads(report.to_json(tmp_path / "report.json"))
    assert data["products"][0]["kernel"] == "cudnn"
    assert data["product_flops"] == report.product_flops
    assert (data["unread_share"], data["opaque_share"], data["deviations"]) == (0, 0, None)
    assert "conv bfloat16 -" in report.to_html()


def test_what_is_not_known_is_said():
    text = module_of(
        "%x = bf16[8,4]{1,0} parameter(0)",
        "%y = what is this",
        "%z = bf16[2,4,4]{2,1,0} parameter(1)",
        "%d = bf16[8,4]{1,0} ragged-dot(%x, %z)",
        "ROOT %r = bf16[8,4]{1,0} all-reduce(%d)",
    )
    report = explain_compiled(text)
    assert (report.platform, report.unknown_products) == ("", 1)
    assert report.products[0].sums == ""
    assert report.unread == ("%y = what is this",)
    assert report.unread_share == 0.2
    said = str(report)
    assert "the FLOPs of 1 product" in said
    assert "1 line of 5 not understood (20.0 %), such as %y = what is this" in said
    assert "?  all-reduce bfloat16" in said


def test_a_loop_of_unknown_length_is_said_to_count_once():
    fn = lambda x: lax.while_loop(lambda h: jnp.sum(h) < 1e3, lambda h: h @ h, x)
    report = explain_compiled(fn, jnp.ones((8, 8)))
    assert report.loops[0].steps is None
    assert report.product_flops == 2 * 8**3
    assert "1 loop of unknown length, counted once" in str(report)


# --- models -------------------------------------------------------------------------------------


class Gpt(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 32)(tokens)
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(h)
        return nn.Dense(64)(nn.gelu(nn.Dense(64)(x)))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(16, (3, 3), use_bias=False)(images))
        x = nn.relu(nn.Conv(16, (3, 3), strides=2, use_bias=False)(x))
        x = x + nn.Conv(16, (3, 3), use_bias=False)(x)
        return nn.Dense(8)(jnp.mean(x, (1, 2)))


class Lstm(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(64)(nn.RNN(nn.OptimizedLSTMCell(32))(nn.Embed(64, 32)(tokens)))


MODELS = {
    "gpt": (
        Gpt(),
        jax.ShapeDtypeStruct((2, 16), jnp.int32),
        jax.ShapeDtypeStruct((2, 16), jnp.int32),
    ),
    "resnet": (
        ResNet(),
        jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    ),
    "lstm": (
        Lstm(),
        jax.ShapeDtypeStruct((2, 16), jnp.int32),
        jax.ShapeDtypeStruct((2, 16), jnp.int32),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_flops_of_a_model_are_those_of_xla_and_of_the_plan(name):
    model, inputs, labels = MODELS[name]
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)

    def loss(params, inputs, labels):
        logits = model.apply(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    step = jax.grad(autocast(loss, policy=BF16))
    compiled = jax.jit(step).lower(params, inputs, labels).compile()
    plan = explain(step, params, inputs, labels)
    report = explain_compiled(compiled, plan=plan)
    assert not report.unread
    assert report.product_flops == pytest.approx(plan.totals.contraction_flops, rel=0.05)
    once = flops_in(parse(compiled.as_text()))
    assert once == pytest.approx(compiled.cost_analysis()["flops"], rel=0.05)
    assert (16 in [loop.steps for loop in report.loops]) is (name == "lstm")
    # What this CPU has no kernel for runs in float32, and the report says so.
    wide = report.by_dtype().get("float32", 0)
    wider = sum(each.flops for each in report.deviations if each.kind == "wider")
    assert wider == pytest.approx(wide, rel=0.05)
    if cpu_kernels.cpu_kernels().wide and name == "gpt":
        assert report.share("bfloat16") > 0.95


# --- planned against made -----------------------------------------------------------------------


def product(plan, operands="bfloat16", result="float32", times=1.0, source=None, **changes):
    """A compiled product for the one in a plan."""
    (row,) = (row for row in plan.rows if row.primitive == "dot_general")
    made = CompiledProduct(
        "dot", (operands, operands), result, "float32", "", "", int(times * row.flops), 1, "", ""
    )
    return dataclasses.replace(made, source=row.source if source is None else source, **changes)


def layer(w, x):
    with jax.named_scope("head"):
        return jnp.tanh(x @ w)


PLAN = explain(layer, jnp.ones((16, 4)), jnp.ones((8, 16)), policy=BF16)
FLOPS = 2 * 8 * 16 * 4
FULL = explain(full_precision()(layer), jnp.ones((16, 4)), jnp.ones((8, 16)), policy=BF16)

COMPARED = {
    "as planned": (PLAN, [product(PLAN)], []),
    "padding": (PLAN, [product(PLAN), product(PLAN, "float32", times=0.04)], []),
    "in float32": (PLAN, [product(PLAN, "float32")], [("wider", "bfloat16", "float32", FLOPS)]),
    "split in two dtypes": (
        PLAN,
        [product(PLAN, times=0.5), product(PLAN, "float32", times=0.5)],
        [("wider", "bfloat16", "float32", FLOPS // 2)],
    ),
    "in bfloat16": (FULL, [product(FULL)], [("narrower", "float32", "bfloat16", FLOPS)]),
    "sums": (
        PLAN,
        [product(PLAN, result="bfloat16", sums="bfloat16")],
        [("sums", "float32", "bfloat16", FLOPS)],
    ),
    "twice": (
        PLAN,
        [product(PLAN)] * 2,
        [("repeated", str(FLOPS), str(2 * FLOPS), FLOPS)],
    ),
    "of unknown FLOPs": (PLAN, [product(PLAN, "float32", flops=None)], []),
    "at a line that is not named": (
        PLAN,
        [product(PLAN, "float32", source="")],
        [("wider", "bfloat16", "float32", FLOPS)],
    ),
}


@pytest.mark.parametrize("name", COMPARED)
def test_planned_against_made(name):
    plan, made, expected = COMPARED[name]
    found = compared(plan, made, ()).deviations
    assert [(d.kind, d.planned, d.made, d.flops) for d in found] == expected
    if expected and made[0].source:
        assert found[0].scope.endswith("head")
        assert "test_explain_compiled.py:" in found[0].source


def test_what_has_no_counterpart_is_counted_and_not_guessed():
    found = compared(PLAN, (), ())
    assert found == ((), FLOPS)


def test_a_collective_in_more_bits_than_planned():
    mesh, spec = jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec()
    total = jax.shard_map(
        lambda x: lax.psum(x.astype(jnp.bfloat16), "data"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    plan = explain(total, jnp.ones(8))
    (row,) = (row for row in plan.rows if row.primitive.startswith("psum"))
    for dtype, kinds in (("float32", ["wire"]), ("bfloat16", [])):
        made = CompiledCollective("all-reduce", dtype, 32, 1, "", row.source)
        assert [each.kind for each in compared(plan, (), (made,)).deviations] == kinds


def test_a_function_with_autocast_in_it_is_compared_with_its_plan():
    w, x = jnp.ones((16, 4)), jnp.ones((8, 16))
    for fn in (autocast(layer, policy=BF16), jax.jit(autocast(layer, policy=BF16))):
        report = explain_compiled(fn, w, x)
        has_kernel = report.share("bfloat16") == 1
        assert len(report.deviations) == (not has_kernel)
        assert ("plan        as planned" in str(report)) is has_kernel
    assert explain_compiled(layer, w, x).deviations is None
    assert explain_compiled(autocast(layer, enabled=False), w, x).deviations is None


def test_the_page_of_a_plan_has_what_was_made_of_it():
    made = explain_compiled(jax.jit(layer).lower(jnp.ones((16, 4)), jnp.ones((8, 16))))
    both = PlannedAndMade(PLAN, made)
    cells = both._page().data["made"]
    assert [bool(cell) for cell in cells] == [row.primitive == "dot_general" for row in PLAN.rows]
    assert cells[0].startswith("float32 -> float32")
    assert made.summary in both._page().summary
    assert str(both).startswith(made.summary)


def test_deviations_stand_first():
    compiled = jax.jit(layer).lower(jnp.ones((16, 4)), jnp.ones((8, 16))).compile()
    report = explain_compiled(compiled, plan=PLAN)
    (found,) = report.deviations
    assert found == Deviation("wider", "bfloat16", "float32", FLOPS, "head", found.source)
    lines = str(report).splitlines()
    assert "plan        1 deviation" in lines
    assert lines.index("Not as planned") < lines.index("Products")
    assert report.unmatched_flops == 0


def test_a_planned_product_at_a_line_without_one_is_said():
    report = explain_compiled(jax.jit(jnp.tanh).lower(jnp.ones(8)), plan=PLAN)
    assert report.unmatched_flops == FLOPS
    assert "1.02 kFLOPs of the plan are at lines without one" in str(report)
