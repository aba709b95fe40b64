"""Which products run in 8 bits, why the others do not, and what reports say of both."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast import (
    BF16,
    Float8,
    Policy,
    autocast,
    check_numerics,
    compare,
    compute_precision,
    explain,
    full_precision,
)
from jmp_autocast.backend import Hardware
from jmp_autocast.float8 import units
from jmp_autocast.quantize_params import QuantizedArray
from tests.support.jaxprs import dtypes, find, trace
from tests.support.numerics import normal

RECIPE = Float8(minimum=16, skip=(), emulate=True)
FP8 = Policy(jnp.bfloat16, matmul=RECIPE)
K, M = 64, 32
A = normal(
    0, x=(M, K), w=(K, K), v=(K, K), odd=(K, 104 // 16 * 16 + 8), vector=(K,), k=(3, 3, 1, 1)
)


def recipe(**options):
    return dataclasses.replace(FP8, matmul=dataclasses.replace(RECIPE, **options))


def reasons(fn, policy=FP8, x=A["x"]):
    rows = explain(autocast(fn, policy=policy, params=0), A, x).rows
    named = ("dot_general", "conv_general_dilated", "ragged_dot_general")
    return [(row.reason, row.cause) for row in rows if row.primitive in named]


def attention(p, x):
    q = x @ p["w"]
    return jax.nn.softmax(q @ q.T) @ q


def in_full(p, x):
    with full_precision():
        return x @ p["w"]


def in_bfloat16(p, x):
    with compute_precision(jnp.bfloat16):
        return x @ p["w"]


def convolved(p, x):
    return lax.conv_general_dilated(
        x[None, :, :, None], p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


YES = ("FLOAT8", "operand 1 is a weight")
LOW = ("LOWER_PRECISION", "")


def no(cause):
    return ("NOT_FLOAT8", cause)


LAST, NONE = no("no other matrix product follows"), no("no operand is a parameter")


def two(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"]


def deep(p, x):
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    x = lax.scan(lambda c, _: (layer(p["w"], c), None), x, None, length=2)[0]
    return layer(p["w"], x) @ p["v"]


HIGHEST = ("USER_PRECISION", "precision=(Precision.HIGHEST, Precision.HIGHEST)")
CASES = {
    "a weight": (lambda p, x: x @ p["w"], FP8, [YES]),
    "a scaled weight": (lambda p, x: x @ (p["w"] * 0.5), FP8, [YES]),
    "stacked weights": (lambda p, x: x @ jnp.concatenate([p["w"], p["v"]], 1), FP8, [YES]),
    "a computed activation": (two, FP8, [YES, YES]),
    "the last": (two, recipe(skip=("last",)), [YES, LAST]),
    "the last behind calls and loops": (deep, recipe(skip=("last",)), [YES, YES, LAST]),
    "attention": (attention, FP8, [YES, NONE, NONE]),
    "two weights": (lambda p, x: p["w"] @ p["v"], FP8, [no("both operands are parameters")]),
    "rows of an embedding": (lambda p, x: x @ p["w"][jnp.arange(K)], FP8, [NONE]),
    "no multiple": (lambda p, x: x @ p["odd"], FP8, [no("N=104 is no multiple of 16")]),
    "too small": (two, recipe(minimum=128), [no("N=64 is below the minimum, 128")] * 2),
    "a convolution": (convolved, FP8, [no("no 8-bit product for conv_general_dilated")]),
    "a precision": (lambda p, x: jnp.matmul(x, p["w"], precision="highest"), FP8, [HIGHEST]),
    "full_precision": (in_full, FP8, [("SCOPE", "scope full_precision")]),
    "compute_precision": (in_bfloat16, FP8, [LOW]),
}


@pytest.mark.parametrize(("fn", "policy", "expected"), CASES.values(), ids=CASES)
def test_the_reason_of_each_product(fn, policy, expected):
    assert reasons(fn, policy) == expected


def test_scopes_say_where():
    def scoped(p, x):
        with jax.named_scope("mlp"):
            x = jnp.tanh(x @ p["w"])
        with jax.named_scope("head"):
            return x @ p["v"]

    last = recipe(skip=("last",))
    assert reasons(scoped, last) == [YES, LAST]
    assert reasons(scoped, last.with_rules({"*": "float8"}, scope="head")) == [YES, YES]
    assert reasons(scoped, FP8.with_rules({"*": "bfloat16"}, scope="head")) == [YES, LOW]
    assert reasons(
        scoped, FP8.with_rules({"*": "bfloat16"}).with_rules({"*": "float8"}, scope="mlp")
    ) == [YES, LOW]
    with pytest.warns(UserWarning, match="no float8 units"):
        found = reasons(scoped, BF16.with_rules({"*": "float8"}, scope="mlp"))
    assert found == [no("N=64 is below the minimum, 1024"), LOW]


STORED = {"w": QuantizedArray(A["w"].astype(jnp.float8_e4m3fn), jnp.float32(1))}
TOKENS = {"1": 1, "7": 7, "symbolic": jax.export.symbolic_shape("rows")[0]}
# What a product says of a number of tokens that is no multiple of 16. What is stored in 8 bits has
# no gradient, which would sum over them; scales of rows stand along them.
WEIGHTS = {
    "trained": (A, RECIPE, False),
    "stored": (STORED, RECIPE, True),
    "stored, rows": (STORED, dataclasses.replace(RECIPE, scaling="row"), False),
}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_any_number_of_tokens_where_no_gradient_sums_over_them(name, tokens):
    params, recipe, is_any = WEIGHTS[name]
    count = TOKENS[tokens]
    what = f"M={count} is no multiple of 16"
    refused = what if isinstance(count, int) else "M is the symbolic size rows"
    x = jax.ShapeDtypeStruct((count, K), jnp.float32)
    fn = autocast(lambda p, x: x @ p["w"], policy=Policy(jnp.bfloat16, matmul=recipe), params=0)
    ((reason, cause),) = [
        (row.reason, row.cause)
        for row in explain(fn, params, x).rows
        if row.primitive == "dot_general"
    ]
    assert (reason, cause.partition(",")[0]) == (YES if is_any else no(refused))


def test_parts_and_layers_of_what_is_stored_are_multiplied_in_any_number():
    stack = QuantizedArray(jnp.ones((2, K, 2 * K), jnp.float8_e4m3fn), jnp.ones(2))

    def fn(p, x):
        x = lax.scan(lambda h, w: (jnp.tanh(h @ w[:, :K]), None), x, p["stack"])[0]
        return x @ p["stack"][1][:, K:]

    rows = explain(autocast(fn, policy=FP8), {"stack": stack}, A["x"][:1]).rows
    assert [row.reason for row in rows if row.primitive == "dot_general"] == ["FLOAT8"] * 2


DEVICES = {
    "A100": ("gpu", "NVIDIA A100", "8.0", "NVIDIA A100 has no float8 units: its matrix products"),
    "MI250": ("gpu", "AMD MI250", "gfx90a", "AMD MI250 has no float8 units"),
    "cpu": ("cpu", "cpu", "", "A CPU has no float8 units"),
    "v5e": ("tpu", "TPU v5 lite", "", "TPU v5 lite has no known float8 units"),
    "H100": ("gpu", "NVIDIA H100", "9.0", None),
    "TPU7x": ("tpu", "TPU7x", "", None),
}


@pytest.mark.parametrize("name", DEVICES)
def test_backends_without_units(name, monkeypatch):
    platform, kind, capability, message = DEVICES[name]
    device = Hardware(platform, kind, capability)
    monkeypatch.setattr(units, "default_device", lambda: device)
    fn, policy = lambda p, x: x @ p["w"], recipe(emulate=False)
    if message is None:
        assert reasons(fn, policy) == [YES]
        return
    with pytest.warns(UserWarning, match=f"{message}.*Float8\\(emulate=True\\)"):
        found = reasons(fn, policy)
    refused = platform == "gpu"
    assert found == [no(f"{kind} has no float8 units") if refused else YES]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reasons(fn, FP8) == [YES]  # emulated: on any backend, and nobody is warned


# --- reports --------------------------------------------------------------------------------


def loss(p, x):
    return jnp.mean(two(p, x) ** 2)


def test_explain_counts_what_runs_in_8_bits():
    report = explain(autocast(loss, policy=recipe(skip=("last",)), params=0), A, A["x"])
    assert report.totals.float8_share == 0.5
    assert report.totals.low_share == 1.0
    assert report.totals.quantized_parameters == 1
    text = str(report)
    assert "of them 50.0 % in float8" in report.summary
    assert "1 products in 8 bits; 1 not: no other matrix product follows" in text
    assert "f8 -> bf16" in text
    assert "f8[" in report.to_html()


def test_compare_and_check_numerics():
    low = autocast(loss, policy=FP8, params=0)
    products = find(trace(jax.grad(low), A, A["x"]), "dot_general")
    assert {dtypes(eqn.invars) for eqn in products} == {
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e5m2"),
    }
    rows = compare(low, A, A["x"]).rows
    errors = [row.introduced for row in rows if row.primitive == "dot_general"]
    assert all(0.01 < error < 0.06 for error in errors)
    _, report = check_numerics(low, mode="overflow")(A, A["x"] * 1e-30)
    found = {row.primitive: row.small for row in report.rows}
    assert found["dot_general"] > 0  # what a float16 could not hold


def test_what_is_not_asked_for_costs_nothing():
    plain = trace(jax.grad(autocast(loss, policy=BF16, params=0)), A, A["x"])
    never = FP8.with_rules({"*": "bfloat16"})
    scoped = lambda p, x: jax.named_call(loss, name="all")(p, x)
    found = trace(jax.grad(autocast(scoped, policy=never, params=0)), A, A["x"])
    assert not find(found, "float8_dot", "tangent_carrier")
    assert len(found.eqns) == len(plain.eqns)
