"""`tune` finds planted culprits, and its policy keeps nothing else in float32."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import (
    BF16,
    FP16,
    CastPolicy,
    Policy,
    autocast,
    compute_precision,
    explain,
    full_precision,
)
from jmp_autocast.call import kernels
from jmp_autocast.inspect.tuning.search import run_bound
from tests.support.jaxprs import trace
from tests.support.tune_programs import (
    EYE,
    X,
    big_square,
    in_cond,
    in_scan,
    in_scope,
    pins,
    tuned,
    with_odd_names,
)

FP32 = CastPolicy.FP32
pytestmark = pytest.mark.usefixtures("as_users_run_it")


def blocks(culprits, count):
    """Six equations in each of many scopes; a square overflows a float16 in some of them."""

    def model(x):
        for i in range(count):
            big = 1000.0 if i in culprits else 100.0
            with jax.named_scope(f"block_{i}"):
                x = jnp.sqrt(jnp.square((x @ EYE) * big) + 1.0) * (1.0 / big)
        return x

    return model


def equations(model):
    return len(trace(model, X).eqns)


@pytest.mark.slow
@pytest.mark.parametrize(("culprits", "count"), [({37}, 80), ({20, 137, 201}, 400)])
def test_planted_overflows_among_480_and_2400_equations(culprits, count):
    model = blocks(culprits, count)
    assert equations(model) == 6 * count
    # Op by op: some twenty programs of 2,400 equations would compile for minutes.
    with jax.disable_jit():
        report = tuned(model, [(X,)], tolerance=0.05)
    assert pins(report) == [(f"block_{i}", "square") for i in sorted(culprits)]
    assert report.policy == keeping(FP16, pins(report))
    assert report.runs <= run_bound(report.candidates)
    assert report.error_before == math.inf
    assert report.error_after < 0.05
    assert {each.why for each in report.kept} == {"range"}


def keeping(policy, pinned):
    for scope, primitive in pinned:
        policy = policy.with_rules({primitive: FP32}, scope=scope)
    return policy


def in_while(x):
    def body(state):
        i, h = state
        return i + 1, in_scope("body", big_square, h)

    return lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1] @ EYE


def in_jit(x):
    return in_scope("call", jax.jit(big_square), x) @ EYE


def in_checkpoint(x):
    return jax.checkpoint(functools.partial(in_scope, "kept", big_square))(x) @ EYE


def outside_any_scope(x):
    return big_square(x) @ EYE


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (in_scan, ("loop/step", "square")),
        (in_cond, ("branch", "square")),
        (in_jit, ("call", "square")),
        (in_checkpoint, ("kept", "square")),
        (with_odd_names, ("a[0]*", "square")),
        (outside_any_scope, ("", "square")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_where_a_culprit_may_stand(fn, expected):
    report = tuned(fn, [(X,)], tolerance=0.01)
    assert pins(report) == [expected]
    assert "tests/support/tune_programs.py" in report.kept[0].source
    out = autocast(fn, policy=report.policy)(X)
    np.testing.assert_allclose(out, fn(X), rtol=0.01)
    full = {r.scope for r in explain(fn, X, policy=report.policy).rows if r.primitive == "square"
            and r.operands == ("float32",)}  # fmt: skip
    assert full == {expected[0]}


def test_what_no_prediction_sees_is_found():
    """The body of a `while` has no cotangents: any operation of the culprit will do."""
    report = tuned(in_while, [(X,)], tolerance=0.01)
    (kept,) = report.kept
    assert (kept.scope, kept.why) == ("body", "not seen")
    assert kept.primitive != "dot_general"
    assert report.unpredicted > 1
    assert "in derivative rules or before a while" in str(report)
    out = autocast(in_while, policy=report.policy)(X)
    np.testing.assert_allclose(out, in_while(X), rtol=0.01)


def test_derivative_rules_are_kept_only_if_needed():
    """The rule of `relu` has operations of its own, and the product has the error."""
    rng = np.random.default_rng(0)
    w, v = rng.standard_normal((2, 8, 8), np.float32)

    def loss(params, x):
        h = jax.nn.relu(in_scope("first", jnp.matmul, x, params[0]))
        return jnp.mean(in_scope("second", jnp.matmul, h, params[1]) ** 2)

    batches = [((w, v), rng.standard_normal((64, 8), np.float32))]
    report = tuned(loss, batches, policy=BF16, argnums=0, tolerance=1e-4)
    assert {primitive for _, primitive in pins(report)} == {"dot_general"}
    assert report.unpredicted == 2


def test_a_function_that_cannot_be_differentiated():
    def model(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return big_square(jax.pure_callback(lambda x: x, shape, big_square(x)))

    report = tuned(model, [(X,)], tolerance=0.01)
    assert len(report.kept) == 1
    np.testing.assert_allclose(autocast(model, policy=report.policy)(X), model(X), rtol=0.01)
    assert "ValueError: Pure callbacks do not support JVP" in report.refused
    assert "operations: ValueError: Pure callbacks do not support JVP" in str(report)


def test_the_report(tmp_path, capsys):
    report = tuned(in_scan, [(X,)], tolerance=0.01)
    text = str(report)
    assert capsys.readouterr().out == ""
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "in_scan: 1 of" in text
    assert "inf before" in text
    assert "relative error if this alone is lowered" in text
    assert "loop/step tune_programs.py:" in text
    data = json.loads(report.to_json(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text("utf-8")) == data
    assert data["error_before"] == data["kept"][0]["worth"] == "inf"
    assert (data["kept"][0]["primitive"], data["kept"][0]["why"]) == ("square", "range")


def test_what_operations_are_worth():
    """In the units of the loss, the largest first: as much as lowering each alone changes it."""
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((8, 8), np.float32) for name in "abc"}
    low = lambda x: lax.reduce_precision(x, 8, 7)

    def loss(params, x, lowered=""):
        for name, size in (("a", 1.0), ("b", 0.03), ("c", 1.0)):
            with jax.named_scope(name):
                h, w = x, params[name]
                x = low(low(h) @ low(w)) if name == lowered else h @ w
                x = jnp.tanh(size * x)
        return jnp.sum(x)

    batches = [(params, rng.standard_normal((64, 8), np.float32)) for _ in range(2)]
    report = tuned(loss, batches, policy=BF16, tolerance=1e-6)
    assert report.loss == pytest.approx(np.mean([float(loss(*each)) for each in batches]), rel=1e-5)
    assert f"change of the loss of {report.loss:.4g}" in str(report)
    worths = {each.scope: each.worth or 0.0 for each in report.kept}
    assert list(worths.values()) == sorted(worths.values(), reverse=True)
    assert set(worths) == {"a", "b", "c"}
    for scope, worth in worths.items():
        measured = max(abs(float(loss(*each, scope) - loss(*each))) for each in batches)
        assert worth >= measured / 2, scope


def test_what_the_program_keeps_in_float32_is_no_candidate():
    """Nor is it in the policy; operations in an inner scope of 16 bits are."""

    def model(x):
        with jax.named_scope("energy"), full_precision():
            h = big_square(x)
            with jax.named_scope("low"), compute_precision("float16"):
                return big_square(h)

    report = tuned(model, [(X,)], tolerance=0.01)
    ((scope, primitive),) = pins(report)
    assert (primitive, scope.split("/")[0], scope.split("/")[-2]) == ("square", "energy", "low")
    assert report.kept[0].why == "range"
    out = autocast(model, policy=report.policy)(X)
    np.testing.assert_allclose(out, model(X), rtol=0.01)


def test_the_policy_that_it_starts_from_stays():
    start = Policy(jnp.float16, level="compute").with_rules({"tanh": "FP32"})
    start = start.with_rules({"*": "float32"}, scope="*/no")
    start = start.with_rules({"abs": "PROMOTE"}, scope="block_77")
    report = tuned(in_scan, [(X,)], tolerance=0.01, policy=start)
    assert report.policy == start.with_rules({"square": FP32}, scope="loop/step")


def test_a_reduction_is_kept_in_its_own_form():
    start = FP16.with_rules({"reduce_sum": "PROMOTE", "mul": "PROMOTE"})

    def model(x):
        h = x @ EYE
        with jax.named_scope("large"):
            h = h * 60000.0
        with jax.named_scope("total"):
            h = jnp.sum(h)
        return h * 1e-6

    report = tuned(model, [(jnp.ones((8, 8)),)], tolerance=0.01, policy=start)
    assert pins(report) == [("total", "reduce_sum")]
    rules = {"reduce_sum": CastPolicy.FP32_SET_OPT_DTYPE}
    assert report.policy == start.with_rules(rules, scope="total")


def test_all_batches_count():
    batches = ((X * scale,) for scale in (0.01, 1.0, 0.02))  # consumed once
    model = in_scan
    assert tuned(model, [(X * 0.01,)], tolerance=0.01).kept == ()
    assert pins(tuned(model, batches, tolerance=0.01)) == [("loop/step", "square")]


@pytest.fixture
def no_kernels(monkeypatch):
    """No kernel was decorated: after that a trace is one for each dtype of kernels."""
    monkeypatch.setattr(kernels, "_decorated", set())


@pytest.mark.usefixtures("no_kernels")
def test_the_function_is_traced_once_for_each_kind_of_batch():
    traced = []

    def model(x, name):
        traced.append((x.shape, name))
        return in_scope(name, big_square, x)

    batches = [(X, "one"), (jnp.ones((3, 8)), "one"), (X * 0.01, "one"), (X, "two")]
    report = tuned(model, batches, tolerance=0.01)
    assert pins(report) == [("one", "square"), ("two", "square")]
    assert report.runs > 4
    assert traced == [((8, 8), "one"), ((3, 8), "one"), ((8, 8), "two")]


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("argnums", [None, 0], ids=["value", "gradient"])
def test_a_trace_serves_all_dtypes_of_the_batches(argnums):
    traced = []

    def model(x):
        traced.append(str(x.dtype))
        return jnp.sum(in_scan(x.astype(jnp.float32)))

    batches = [(X,), (X.astype(jnp.bfloat16),)]
    report = tuned(model, batches, tolerance=0.01, argnums=argnums)
    assert report.kept
    assert traced == ["float32", "bfloat16"]


def loss(params, x):
    with jax.named_scope("head"):
        return jnp.mean(jnp.tanh(x @ params["w"]) * 1e-6) * 1e-3


def test_gradients_are_outputs_too():
    """The loss is right, and its gradient, far below the range of a float16, is not."""
    params = {"w": jnp.full((8, 8), 0.1)}
    assert tuned(loss, [(params, X)], tolerance=0.01).kept == ()
    report = tuned(loss, [(params, X)], tolerance=0.01, argnums=0)
    assert report.kept
    gradient = jax.grad(autocast(loss, policy=report.policy))(params, X)["w"]
    np.testing.assert_allclose(gradient, jax.grad(loss)(params, X)["w"], rtol=0.01)


@jax.custom_vjp
def scaled(x):
    return x @ EYE


def scaled_forward(x):
    return scaled(x), x


def scaled_backward(x, cotangent):
    with jax.named_scope("mine"):
        large = (cotangent @ EYE) * 3e5
        return ((large @ EYE) * 1e-5,)


scaled.defvjp(scaled_forward, scaled_backward)


def test_a_backward_rule_that_overflows():
    def model(x):
        with jax.named_scope("layer"):
            return jnp.sum(scaled(x))

    report = tuned(model, [(X,)], tolerance=0.01, argnums=0)
    assert {scope for scope, _ in pins(report)} == {"layer/mine"}
    gradient = jax.grad(autocast(model, policy=report.policy))(X)
    np.testing.assert_allclose(gradient, jax.grad(model)(X), rtol=0.01)


def attention(params, x):
    """A number is added to all scores of a row: the softmax removes it, and its gradient is 0."""
    scores = x @ params["w"] + params["b"] * jnp.ones((1, 8))
    return jnp.mean(jax.nn.softmax(scores) ** 2)


def test_a_gradient_that_is_zero_but_for_rounding_keeps_nothing_in_float32():
    rng = np.random.default_rng(0)
    params = {
        "w": rng.standard_normal((8, 8), np.float32),
        "b": rng.standard_normal((64, 1), np.float32),
    }
    batches = [(params, rng.standard_normal((64, 8), np.float32))]
    exact = jax.jit(jax.grad(attention))(*batches[0])
    lowered = jax.jit(jax.grad(autocast(attention, policy=BF16)))(*batches[0])
    size = np.linalg.norm
    assert 0 < size(exact["b"]) < 1e-6 * size(exact["w"])
    assert size(lowered["b"] - exact["b"]) > 0.05 * size(exact["b"])
    report = tuned(attention, batches, policy=BF16, argnums=0, tolerance=0.05)
    assert (report.policy, report.undetermined) == (BF16, 1)
    assert "left out    1 array with too few digits in float32" in str(report)
    assert report.error_before < 0.05


def test_keys_and_integers_of_a_batch_stay():
    def model(key, w, i):
        noise = jax.random.normal(key, (8, 8))
        return jnp.tanh((w + 0.0 * noise) @ EYE)[i], noise

    batches = [(jax.random.key(0), X, np.int32(1))]
    report = tuned(model, batches, policy=BF16, tolerance=0.05)
    assert (report.policy, report.undetermined) == (BF16, 0)
