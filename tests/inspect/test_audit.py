"""`audit`: each kind of risk on a small program, and nothing on what is well written."""

import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jmp_autocast import BF16, autocast, full_precision
from jmp_autocast.inspect import audit
from jmp_autocast.inspect.auditing.kinds import KINDS, unit_roundoff

F16, B16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def shape(*sizes, dtype=B16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def kinds(fn, *args, **options):
    return [finding.kind for finding in audit(fn, *args, **options).findings]


X = shape(64, 64)
X16 = shape(64, 64, dtype=F16)
PARAMS = {"params": {"w": X}}


def running_sum(x):
    return lax.scan(lambda c, y: (c + y, None), jnp.zeros((), x.dtype), x[0])[0]


def counting(x):
    return lax.while_loop(lambda s: s[0] < 3.0, lambda s: (s[0] + 1, s[1]), (x[0, 0], x))


def rope(x):
    angles = jnp.arange(64)[:, None].astype(x.dtype) * jnp.ones((64,), x.dtype)
    return x * jnp.sin(angles)


def rope_cast_late(x):
    angles = jnp.arange(64, dtype=F32)[:, None] * jnp.ones((64,), F32)
    return x * jnp.cos(angles.astype(x.dtype))


def descent(variables, g):
    return jax.tree.map(lambda w: w - 0.1 * g, variables)


def stored_in_16_bits(variables, g):
    return jax.tree.map(lambda w: (w.astype(F32) - 0.1 * g.astype(F32)).astype(w.dtype), variables)


def average(variables, x):
    return jax.tree.map(lambda w: 0.99 * w + 0.01 * x, variables)


def in_a_branch(x):
    return lax.cond(x[0, 0] > 0, jnp.exp, jnp.tanh, x)


@jax.custom_vjp
def with_a_rule(x):
    return jnp.log(x)


with_a_rule.defvjp(lambda x: (jnp.log(x), x), lambda x, ct: (ct / x,))


# The kinds that are found, several with a comma; the program, and its arguments.
RISKY = {
    "sum": ("sum", lambda x: jnp.sum(x, 0, dtype=x.dtype), X),
    "sum of windows": (
        "sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (8, 8), (8, 8), "VALID"),
        X16,
    ),
    "cumsum": ("sum", lambda x: lax.cumsum(x), X),
    "rows added": ("sum", lambda x: x.at[jnp.zeros(64, jnp.int32)].add(x), X),
    "bias gradient": (
        "gradient sum",
        jax.grad(lambda b, x: jnp.sum((x + b).astype(F32))),
        shape(64),
        X,
    ),
    "product": ("product", lambda x: jnp.prod(x, 0, dtype=x.dtype), X),
    "scan": ("accumulator, loss", running_sum, X),
    "while": ("accumulator, loss", counting, X),
    "softmax": ("exponential", jax.nn.softmax, X),
    "logsumexp": ("exponential, logarithm", lambda x: jax.nn.logsumexp(x, axis=-1), X),
    "power": ("power", lambda x: x**0.3, X),
    "norm": ("norm", lambda x: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3), X),
    "square": ("square", lambda x: jnp.mean(jnp.square(x), -1), X16),
    "rope": ("angle", rope, X),
    "rope, cast late": ("angle", rope_cast_late, X),
    "positions": ("position", lambda x: x + jnp.arange(4096, dtype=x.dtype)[:, None, None], X),
    "routing": ("routing", lambda x: lax.top_k(x, 2), X),
    "a gate": ("digits", lambda x: 1 - jax.nn.sigmoid(x), X),
    "mask": ("mask", lambda x: jnp.where(x > 0, x, -1e9), X16),
    "mask, added": ("mask", lambda x: x + (x > 0).astype(x.dtype) * -1e9, X16),
    "epsilon": ("epsilon", lambda x: x / (jnp.abs(x) + 1e-8), X16),
    "update": ("update", descent, PARAMS, X),
    "stored": ("update", stored_in_16_bits, PARAMS, X),
    "average": ("update", average, PARAMS, X),
    "loss": ("loss", lambda x: jnp.mean(x), X),
    "branch": ("exponential", in_a_branch, X),
    "rule": ("logarithm", with_a_rule, X),
    "checkpoint": ("exponential", jax.checkpoint(lambda x: jnp.exp(x)), X),
    "special function": ("function", lax.lgamma, X),
}


# What JAX says itself where it rounds a number of the program to an infinity.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", RISKY)
def test_each_kind_is_found(name):
    expected, fn, *args = RISKY[name]
    assert kinds(fn, *args) == expected.split(", ")
    # The same program in float32 has nothing to look at.
    wide = jax.tree.map(lambda x: shape(*x.shape, dtype=F32), args)
    report = audit(fn, *wide)
    if name != "positions":
        assert (report.is_clean, report.dtypes) == (True, ())


def test_every_kind_is_tested():
    assert {kind for found, *_ in RISKY.values() for kind in found.split(", ")} == set(KINDS)


def attention(q, k, v):
    scores = jnp.einsum("td,sd->ts", q, k, preferred_element_type=F32)
    scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), scores, -1e9)
    return jax.nn.softmax(scores).astype(q.dtype) @ v


def careful_norm(x, scale):
    wide = x.astype(F32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(
        x.dtype
    ) * scale


def layers(stacked, x):
    cast = jax.tree.map(lambda w: w.astype(B16), stacked)
    return lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w), None), x, cast)[0]


def chosen(x):
    with full_precision():
        return jnp.exp(x)


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


FINE = {
    "matmul": (jnp.matmul, X, X),
    "bias": (lambda x, b: x @ x + b, X, shape(64)),
    "mean": (lambda x: jnp.mean(x, -1), X),
    "variance": (lambda x: jnp.var(x, -1), X),
    "few terms": (lambda x: jnp.sum(x[:, :4], -1, dtype=x.dtype), X),
    "attention": (attention, X, X, X),
    "norm": (careful_norm, X, shape(64)),
    "scan over layers": (layers, {"w": shape(24, 64, 64, dtype=F32)}["w"], X),
    "own infinity": (lambda x: jnp.where(x > 0, x, -jnp.inf), X16),
    "sine of values": (lambda x: x + jnp.sin(x), X),
    "few positions": (lambda x: x + jnp.arange(64, dtype=x.dtype), X),
    "one-hot": (lambda i: jax.nn.one_hot(i, 64, dtype=B16), shape(64, dtype=jnp.int32)),
    "residual": (lambda params, x: x + x @ params["w"], {"w": X}, X),
    "a chosen precision": (chosen, X),
    "autocast": (autocast(lambda x: jnp.exp(x @ x), policy=BF16, output_dtype="computed"), X),
    "dropout": (dropped, jax.random.key(0), X),
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_fine_is_not_listed(name):
    fn, *args = FINE[name]
    report = audit(fn, *args)
    assert report.is_clean, report


@pytest.mark.parametrize(
    "activation",
    "celu elu gelu leaky_relu mish relu selu silu softplus tanh sigmoid hard_tanh".split(),
)
def test_activations_are_not_listed(activation):
    assert kinds(getattr(jax.nn, activation), X) == []


class LinenBlock(nn.Module):
    safe: bool = True

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(dtype=B16)(x)
        attend = nn.MultiHeadDotProductAttention(4, dtype=B16, force_fp32_for_softmax=self.safe)
        x = x + attend(h)
        h = nn.RMSNorm(dtype=B16)(x)
        return x + nn.Dense(64, dtype=B16)(nn.gelu(nn.Dense(256, dtype=B16)(h)))


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(("safe", "expected"), [(True, []), (False, ["exponential"])])
def test_a_model_of_linen(safe, expected):
    model, x = LinenBlock(safe), jnp.ones((2, 32, 64), B16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(F32)))

    assert kinds(loss, variables, x) == expected
    if safe:
        # JAX adds up the gradients of biases and scales in the dtype that they are read in.
        assert set(kinds(jax.grad(loss), variables, x)) == {"gradient sum"}


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(64, dtype=B16, rngs=rngs)
        self.up = nnx.Linear(64, 128, dtype=B16, rngs=rngs)
        self.down = nnx.Linear(128, 64, dtype=B16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.relu(self.up(self.norm(x)))))


@pytest.mark.usefixtures("as_users_run_it")
def test_a_model_of_nnx_with_state():
    from jmp_autocast.integrations import nnx as _  # noqa: F401  what opens models of NNX

    model, x = NnxBlock(nnx.Rngs(0)), jnp.ones((32, 64), B16)
    assert kinds(lambda model, x: jnp.mean(model(x).astype(F32)), model, x) == []


def test_a_finding_names_the_line_of_the_user():
    def model(x):
        with jax.named_scope("head"):
            return jnp.where(x > 0, x, -1e9)

    (finding,) = audit(model, X16).findings
    assert "test_audit.py" in finding.source
    assert "(test_a_finding" in finding.source
    assert finding.scope == "head"
    assert finding.worst == math.inf


def test_layers_of_one_line_are_one_finding():
    def model(x):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.exp(x)
        return x

    (finding,) = audit(model, X).findings
    assert (finding.places, finding.scope) == (3, "layer_0")


@pytest.mark.parametrize("dtype", [F16, B16])
@pytest.mark.parametrize("n", [64, 1000])
def test_the_estimate_of_a_sum_holds(dtype, n):
    """Sums of random numbers, added one by one in 16 bits, against the estimate."""
    (finding,) = audit(lambda x: lax.cumsum(x), shape(n, dtype=dtype)).findings
    assert finding.n == n
    rows = np.random.default_rng(0).uniform(-1, 1, (50, n)).astype(dtype)
    total = np.zeros(50, dtype)
    for column in rows.T:
        total = (total + column).astype(dtype)
    wide = rows.astype(np.float64)
    errors = np.abs(total - wide.sum(1)) / np.abs(wide).sum(1)
    assert errors.max() <= finding.worst
    assert np.sqrt(np.mean(errors**2)) <= finding.typical


@pytest.mark.parametrize("dtype", [F16, B16])
def test_the_estimate_of_an_exponential_holds(dtype):
    (finding,) = audit(jnp.exp, shape(8, dtype=dtype)).findings
    end = math.log(float(jnp.finfo(dtype).max)) * 0.99
    x = np.linspace(-end / 2, end, 5000)
    exact, computed = np.exp(x), np.exp(x.astype(dtype).astype(np.float64)).astype(dtype)
    errors = np.abs(computed.astype(np.float64) - exact) / exact
    assert finding.worst / 3 < errors.max() <= 1.02 * finding.worst  # second-order terms
    assert errors[np.abs(x) <= 1].max() <= finding.typical


def test_steps_of_a_loop_are_counted():
    (finding, _) = audit(running_sum, X).findings
    assert (finding.n, finding.typical) == (64, 8 * unit_roundoff(B16))
    (finding, _) = audit(counting, X).findings
    assert (finding.n, finding.typical, finding.worst) == (None, None, 1.0)


def test_both_halves_in_one_program():
    report = audit(lambda x, y: (jnp.exp(x), jnp.exp(y)), X, X16)
    assert [finding.dtype for finding in report.findings] == ["float16", "bfloat16"]
    assert report.dtypes == ("float16", "bfloat16")


def test_what_is_not_looked_into_is_named():
    def foreign(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    report = audit(foreign, X)
    assert report.opaque == ("pure_callback",)
    assert "the inside of pure_callback" in str(report)


def test_as_text_and_as_data():
    report = audit(lambda x: jnp.where(x > 0, jnp.exp(x), -1e9), X16)
    lines = str(report).splitlines()
    assert lines[0] == "<lambda>: 2 risky lines in float16"
    assert all(len(line) <= 100 or line.startswith("  at ") for line in lines)
    assert sum("test_audit.py" in line for line in lines) == 2
    assert any("instead" in line and "finfo" in line for line in lines)
    data = json.loads(report.to_json())
    assert data["is_clean"] is False
    assert [row["worst"] for row in data["findings"]][1] == "inf"


def test_ignore():
    assert kinds(RISKY["logsumexp"][1], X, ignore=("logarithm",)) == ["exponential"]
    with pytest.raises(ValueError, match=r"'logaritm'.*Did you mean 'logarithm'"):
        audit(jnp.exp, X, ignore=("logaritm",))
    with pytest.raises(TypeError, match="ignore takes several kinds"):
        audit(jnp.exp, X, ignore="logarithm")


def test_each_need_of_a_line_says_what_goes_wrong():
    """An index and factors are of one line and one primitive: two rows of the planner's table."""

    def fn(x):
        index, factors = x * 0.3, x * 0.7
        return jnp.floor(index), factors[::2] * factors[1::2]

    report = audit(fn, X)
    found = [finding.says for finding in report.findings if finding.kind == "digits"]
    assert len(found) == len(set(found)) == 2
    assert all(says in str(report) for says in found)
