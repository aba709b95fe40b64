"""`explain_compiled`: its report, alone and beside that of another program."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jmp_autocast import BF16, autocast, explain, explain_compiled
from tests.support.hlo_texts import TEXTS, module_of


def text_of(name):
    return (TEXTS / f"{name}.txt").read_text("utf-8")


# --- the report ---------------------------------------------------------------------------------


def test_a_sharded_step_of_a_tpu():
    """Parameters are gathered in bfloat16, gradients are summed in float32."""
    report = explain_compiled(text_of("tpu_sharded_step"))
    assert {"all-gather bfloat16", "all-reduce float32"} <= report.collectives.keys()
    assert report.share("bfloat16") == 1.0
    assert report.product_flops == 3 * 2 * 128 * 1024 * 1024
    casts = [(each.operand, each.result) for each in report.kernels if each.kind == "cast"]
    assert casts == [("float32", "bfloat16")]
    text = str(report)
    assert "all-gather bfloat16" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_kernel_whose_inside_is_not_shown_counts_as_nothing_else():
    report = explain_compiled(text_of("tpu_splash_attention"))
    assert not report.products
    assert report.calls == ("tpu_custom_call",) * 2
    assert "2 opaque kernels: tpu_custom_call" in str(report)
    assert report.summary.startswith("jit_att on tpu: no products; 13 kernels, 0 only cast")


def test_what_is_not_known_is_said():
    text = module_of(
        "%x = bf16[8,4]{1,0} parameter(0)",
        "%y = what is this",
        "%z = bf16[2,4,4]{2,1,0} parameter(1)",
        "%d = bf16[8,4]{1,0} ragged-dot(%x, %z)",
        "ROOT %r = bf16[8,4]{1,0} all-reduce(%y)",
    )
    report = explain_compiled(text)
    assert (report.platform, report.cycles, report.temporary) == ("", None, None)
    assert (report.products[0].sums, report.products[0].flops) == ("", None)
    assert report.unread == ("%y = what is this",)
    assert report.collectives == {"all-reduce ?": 1}
    said = str(report)
    assert "The FLOPs of 1 product are not known." in said
    assert "1 line not understood: %y = what is this" in said
    assert "cycles (" not in said
    assert "temporary" not in said


def test_a_loop_of_unknown_length_is_said_to_count_once():
    fn = lambda x: lax.while_loop(lambda h: jnp.sum(h) < 1e3, lambda h: h @ h, x)
    report = explain_compiled(fn, jnp.ones((8, 8)))
    assert report.loops_of_unknown_length == 1
    assert report.product_flops == 2 * 8**3
    assert "1 loop of unknown length, counted once." in str(report)


# --- cycles -------------------------------------------------------------------------------------


def test_cycles_by_scope_and_kind():
    report = explain_compiled(text_of("tpu_scan"))
    kinds, scopes = report.cycles_by_kind(), report.cycles_by_scope()
    assert list(kinds) == ["product", "cast", "copy", "other"]
    assert sum(kinds.values()) == report.cycles
    assert {kind: sum(scope[kind] for scope in scopes.values()) for kind in kinds} == kinds
    # All products are in the layer, each in one of two loops of five steps.
    assert [product.times for product in report.products] == [5, 5, 5]
    assert scopes["layer"] == {"product": kinds["product"], "cast": 0, "copy": 0, "other": 0}
    copies = [each for each in report.kernels if each.name.startswith("copy-start")]
    assert [(each.kind, each.cycles) for each in copies] == [("other", None)] * 2
    said = str(report)
    assert "cycles (estimate)" in said
    assert "the compiler's estimate, without asynchronous copies" in said
    assert all(len(line) <= 100 for line in said.splitlines())


# --- beside another program ---------------------------------------------------------------------


def layer(w, x):
    with jax.named_scope("head"):
        return jnp.tanh(x @ w)


def by_hand(w, x):
    return layer(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))


def test_a_function_beside_another_one_of_the_same_arguments():
    w, x = jnp.ones((16, 4)), jnp.ones((8, 16))
    report = explain_compiled(by_hand, w, x, against=layer)
    assert (report.name, report.against.name) == ("jit_by_hand", "jit_layer")
    assert report.against == explain_compiled(layer, w, x)
    lines = str(report).splitlines()
    assert lines[1].startswith("against jit_layer on cpu: ")
    (row,) = (line for line in lines if line.endswith("FLOPs of products"))
    assert row.split()[:5] == ["1.02", "k", "1.02", "k", "1.00"]
    assert report.to_dict()["against"]["name"] == "jit_layer"


# --- models -------------------------------------------------------------------------------------


class Lstm(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(64)(nn.RNN(nn.OptimizedLSTMCell(32))(nn.Embed(64, 32)(tokens)))


def test_the_flops_of_a_model_are_those_of_the_plan():
    model, tokens = Lstm(), jax.ShapeDtypeStruct((2, 16), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, inputs, labels):
        logits = model.apply(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    step = jax.grad(autocast(loss, policy=BF16))
    plan = explain(step, params, tokens, tokens)
    report = explain_compiled(step, params, tokens, tokens)
    assert not report.unread
    assert report.product_flops == pytest.approx(plan.totals.contraction_flops, rel=0.05)
    assert 16 in {product.times for product in report.products}
