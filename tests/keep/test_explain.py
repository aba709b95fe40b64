"""`explain_kept` and `explain`: what is kept and why, and what is computed again."""

import collections
import json
import re

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, autocast, explain, keep_less
from jmp_autocast.inspect import explain_kept
from tests.support.jaxprs import trace

from .programs import LAYERS, ROWS, WEIGHTS, X, scanned, small
from .test_segments import kept_nbytes

pytestmark = pytest.mark.usefixtures("jit_caches")


def test_bytes_are_those_that_jax_keeps():
    report = explain_kept(keep_less(scanned), WEIGHTS, X)
    assert report.declared_nbytes == kept_nbytes(scanned)
    assert report.nbytes == kept_nbytes(keep_less(scanned))
    assert report.share < 0.5
    # What is not in the table are slices of weights, and what the end of the program keeps.
    assert 0.8 * report.nbytes < sum(a.nbytes for a in report.arrays) <= report.nbytes


def test_why_arrays_are_kept():
    report = explain_kept(scanned, WEIGHTS, X)
    reasons = {(a.primitive, a.reason) for a in report.arrays}
    assert ("dot_general", "a contraction is never done again") in reasons
    assert ("mul", "read again behind a contraction") in reasons
    widest = next(a for a in report.arrays if a.shape == (ROWS, 32))
    assert (widest.dtype, widest.times, widest.nbytes) == ("float32", LAYERS, LAYERS * ROWS * 128)
    assert {"integer_pow", "mul"} <= set(widest.readers)  # the chain of the GELU is made of it
    assert "programs.py" in widest.source


def test_what_is_computed_again():
    report = explain_kept(scanned, WEIGHTS, X)
    gelu = next(i for i in report.islands if "tanh" in i.recomputed)
    assert gelu.contractions == 1, "that which reads the GELU"
    assert gelu.nbytes == 4 * gelu.flops  # float32
    assert not any("dot_general" in i.recomputed for i in report.islands)


def test_a_mixed_program_and_its_report():
    mixed = keep_less(autocast(scanned, policy=BF16), residuals="auto")
    report = explain(mixed, WEIGHTS, X)
    assert report.kept == explain_kept(mixed, WEIGHTS, X)
    assert report.totals.residual_nbytes == report.kept.nbytes < report.kept.declared_nbytes
    text = str(report)
    for part in ("without residuals='auto'", "computed again, and not kept", "never done again"):
        assert part in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert json.loads(report.to_json())["kept"]["islands"][0]["recomputed"]
    assert explain(autocast(scanned, policy=BF16), WEIGHTS, X).kept is None


def test_shapes_stand_for_arrays_and_scopes_are_named():
    def layer(x, w):
        with jax.named_scope("inner"):
            return jnp.exp(jnp.sin(x @ w["q"]))

    def loss(w, x):
        with jax.named_scope("outer"):
            return scanned(w, x, layer)

    shapes = jax.eval_shape(lambda: (WEIGHTS, X))
    report = explain_kept(keep_less(loss, residuals="recompute"), *shapes)
    (dot,) = (a for a in report.arrays if a.primitive == "dot_general")
    assert dot.scope == "outer/inner"
    assert "sin" in next(i for i in report.islands if i.scope == "outer/inner").recomputed


def test_what_has_no_derivative():
    def loss(w, x):
        return jax.lax.while_loop(lambda x: x.sum() < 9.0, lambda x: x + 1.0, small(w, x))

    report = explain_kept(loss, WEIGHTS, X)
    assert (report.nbytes, report.share) == (None, 1.0)
    assert report.summary == "loss: JAX cannot differentiate it"
    assert trace(keep_less(loss), WEIGHTS, X)


def test_the_cut_value_by_value():
    report = explain_kept(scanned, WEIGHTS, X)
    (cut,) = report.cuts
    assert cut.times == LAYERS
    bytes_of = collections.Counter()
    for value in cut.values:
        bytes_of[value.fate] += value.nbytes * cut.times
    assert bytes_of["kept"] == sum(array.nbytes for array in report.arrays)
    assert bytes_of["computed again"] == sum(island.nbytes for island in report.islands)
    fates = {(value.primitive, value.fate) for value in cut.values}
    assert ("dot_general", "kept") in fates
    assert ("tanh", "computed again") in fates
    assert ("dot_general", "computed again") not in fates
    assert json.loads(report.to_json())["cuts"][0]["values"][0]["fate"] == cut.values[0].fate


def in_checkpoints(params, x):
    def block(x, w):
        return x + jax.nn.gelu(x @ w), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(block), x, params)[0])


@pytest.mark.parametrize(
    ("fn", "residuals", "because"),
    [
        (
            lambda w, x: jnp.sum(jax.nn.gelu(x @ w[0])),
            "auto",
            "plans loops only, .* 'recompute' would",
        ),
        (in_checkpoints, "auto", "jax.checkpoint keeps what its policy saves; .*='auto'"),
        (in_checkpoints, "declared", "^$"),
    ],
)
def test_a_reason_is_given_where_nothing_is_computed_again(fn, residuals, because):
    wrapped = keep_less(fn, residuals=residuals)
    report = explain_kept(wrapped, jnp.ones((2, 8, 8)), jnp.ones((4, 8)))
    assert report.islands == ()
    assert re.search(because, report.because)
    assert report.because in str(report)
    mixed = keep_less(autocast(fn, policy=BF16), residuals=residuals)
    assert re.search(because, str(explain(mixed, jnp.ones((2, 8, 8)), jnp.ones((4, 8)))), re.M)
