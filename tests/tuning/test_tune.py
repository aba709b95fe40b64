"""`tune`: planted culprits are found, and the policy that comes back keeps nothing else."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, CastPolicy, Policy, autocast, explain, tune
from jmp_autocast.inspect.tuning.batches import distances, worst
from jmp_autocast.inspect.tuning.search import run_bound
from jmp_autocast.inspect.tuning.tune import UnreachableError
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
        policy, report = tuned(model, [(X,)], tolerance=0.05)
    assert pins(report) == [(f"block_{i}", "square") for i in sorted(culprits)]
    assert policy == keeping(FP16, pins(report))
    assert report.runs <= run_bound(len(culprits), report.candidates)
    assert (report.error_before, report.share_after) == (math.inf, 1.0)
    assert report.error_after < 0.05
    assert {each.why for each in report.kept} == {"range"}


def keeping(policy, pinned):
    for scope, primitive in pinned:
        policy = policy.with_rules({primitive: FP32}, scope=scope)
    return policy


def cancelling(culprits, count):
    """Ten equations in each of many scopes: adds and takes off what is large everywhere.

    In bfloat16 that loses all of the value where it is not a sum of powers of two.
    """

    def model(x):
        for i in range(count):
            with jax.named_scope(f"block_{i}"):
                h = x @ EYE
                shift = 3000.0 if i in culprits else 4096.0
                # A row beside a product is rounded as a bias is.
                row = jnp.array([3000.0, 3001.0] * 4 if i in culprits else [0.0] * 8)
                h = h + row
                h = h - row
                h = h * shift
                h = jnp.abs(h)
                h = h * (1.0 / shift)
                h = jnp.maximum(h, 0.25)
                x = jnp.minimum(h, 1.0)
        return x

    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("culprits", "count"),
    # The bounds for other numbers, and for 2,000 equations, are in test_tune_search.py.
    [({37}, 80), ({3, 20, 38}, 40)],
    ids=["1 in 800", "3 in 400"],
)
def test_planted_culprits_whose_values_are_like_all_others(culprits, count):
    model = cancelling(culprits, count)
    assert equations(model) == 10 * count
    with jax.disable_jit():
        policy, report = tuned(model, [(X,)], tolerance=0.05, policy=BF16)
    assert pins(report) == [(f"block_{i}", "add") for i in sorted(culprits)]
    assert policy == keeping(BF16, pins(report))
    assert report.runs <= run_bound(len(culprits), report.candidates)
    assert {each.why for each in report.kept} == {"search"}


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
        (in_while, ("body", "square")),
        (in_jit, ("call", "square")),
        (in_checkpoint, ("kept", "square")),
        (with_odd_names, ("a[0]*", "square")),
        (outside_any_scope, ("", "square")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_where_a_culprit_may_stand(fn, expected):
    policy, report = tuned(fn, [(X,)], tolerance=0.01)
    assert pins(report) == [expected]
    assert "tests/support/tune_programs.py" in report.kept[0].source
    out = autocast(fn, policy=policy)(X)
    np.testing.assert_allclose(out, fn(X), rtol=0.01)
    full = {r.scope for r in explain(fn, X, policy=policy).rows if r.primitive == "square"
            and r.operands == ("float32",)}  # fmt: skip
    assert full == {expected[0]}


def test_what_has_to_be_kept_together():
    """The square is too large, and so is what the matmul after it reads."""

    def model(x):
        with jax.named_scope("square"):
            h = jnp.square((x @ EYE) * 1000.0)
        with jax.named_scope("shift"):
            h = jnp.abs(h) + 1.0
        with jax.named_scope("dense"):
            return (h @ EYE) * 1e-6

    _, report = tuned(model, [(X,)], tolerance=0.01)
    assert ("dense", "dot_general") in pins(report)
    assert report.share_after == 0.5
    for dropped in pins(report):
        fewer = keeping(FP16, [pin for pin in pins(report) if pin != dropped])
        assert not np.allclose(autocast(model, policy=fewer)(X), model(X), rtol=0.01), dropped


def test_nothing_to_keep():
    policy, report = tuned(lambda x: jnp.tanh(x @ x), [(X,)], tolerance=0.01)
    assert policy == FP16
    assert (report.runs, report.kept) == (1, ())
    assert report.error_before == report.error_after > 0


def test_the_policy_that_it_starts_from_stays():
    start = (
        Policy(jnp.bfloat16, level="compute")
        .with_rules({"tanh": "FP32"})
        .with_rules({"*": "float32"}, scope="*/no")
    )
    start = start.with_rules({"abs": "PROMOTE"}, scope="block_77")
    policy, _ = tuned(cancelling({7}, 10), [(X,)], tolerance=0.05, policy=start)
    assert policy == start.with_rules({"add": FP32}, scope="block_7")


def test_a_reduction_is_kept_in_its_own_form():
    start = FP16.with_rules({"reduce_sum": "PROMOTE"})

    def model(x):
        h = x @ EYE
        with jax.named_scope("large"):
            h = h * 60000.0
        with jax.named_scope("total"):
            h = jnp.sum(h)
        return h * 1e-6

    policy, report = tuned(model, [(jnp.ones((8, 8)),)], tolerance=0.01, policy=start)
    assert pins(report) == [("total", "reduce_sum")]
    assert policy.rules[-1] == ("total", "reduce_sum", CastPolicy.FP32_SET_OPT_DTYPE)


def test_all_batches_count():
    batches = ((X * scale,) for scale in (0.01, 1.0, 0.02))  # consumed once
    model = in_scan
    assert tuned(model, [(X * 0.01,)], tolerance=0.01)[1].kept == ()
    assert pins(tuned(model, batches, tolerance=0.01)[1]) == [("loop/step", "square")]


def test_the_function_is_traced_once_for_each_kind_of_batch():
    traced = []

    def model(x, name):
        traced.append((x.shape, name))
        return in_scope(name, big_square, x)

    batches = [(X, "one"), (jnp.ones((3, 8)), "one"), (X * 0.01, "one"), (X, "two")]
    _, report = tuned(model, batches, tolerance=0.01)
    assert pins(report) == [("one", "square"), ("two", "square")]
    assert report.runs > 4
    assert traced == [((8, 8), "one"), ((3, 8), "one"), ((8, 8), "two")]


@pytest.mark.parametrize("argnums", [None, 0], ids=["value", "gradient"])
def test_a_trace_serves_all_dtypes_of_the_batches(argnums):
    traced = []

    def model(x):
        traced.append(str(x.dtype))
        return jnp.sum(in_scan(x.astype(jnp.float32)))

    batches = [(X,), (X.astype(jnp.bfloat16),)]
    _, report = tuned(model, batches, tolerance=0.01, argnums=argnums)
    assert report.kept
    assert traced == ["float32", "bfloat16"]


def loss(params, x):
    with jax.named_scope("head"):
        return jnp.mean(jnp.tanh(x @ params["w"]) * 1e-6) * 1e-3


def test_gradients_are_outputs_too():
    """The loss is right, and its gradient, far below the range of a float16, is not."""
    params = {"w": jnp.full((8, 8), 0.1)}
    assert tuned(loss, [(params, X)], tolerance=0.01)[1].kept == ()
    policy, report = tuned(loss, [(params, X)], tolerance=0.01, argnums=0)
    assert report.kept
    gradient = jax.grad(autocast(loss, policy=policy))(params, X)["w"]
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

    policy, report = tuned(model, [(X,)], tolerance=0.01, argnums=0)
    assert {scope for scope, _ in pins(report)} == {"layer/mine"}
    gradient = jax.grad(autocast(model, policy=policy))(X)
    np.testing.assert_allclose(gradient, jax.grad(model)(X), rtol=0.01)


def test_a_callable_decides():
    seen = []

    def accept(mixed):
        seen.append(mixed.policy)
        return np.isfinite(np.asarray(mixed(X))).all()

    policy, report = tuned(in_scan, [(X,)], accept=accept)
    assert pins(report) == [("loop/step", "square")]
    assert seen[0] == FP16
    assert policy in seen
    assert len(seen) == len(set(seen)) == report.runs
    assert (report.tolerance, report.error_before, report.error_after) == (None, None, None)


def test_accept_may_change_what_the_function_reads():
    big = [1.0]

    def model(x):
        return in_scope("scaled", functools.partial(big_square, big=big[0]), x)

    def accept(mixed):
        big[0] = 300.0
        return np.isfinite(np.asarray(mixed(X))).all()

    assert pins(tuned(model, [(X,)], accept=accept)[1]) == [("scaled", "square")]


def test_what_accept_raises_is_raised():
    def accept(mixed):
        raise ZeroDivisionError("in the user's code")

    with pytest.raises(ZeroDivisionError, match="user's"):
        tune(in_scan, batches=[(X,)], policy=FP16, accept=accept, progress=False)


def test_accept_out_of_reach():
    with pytest.raises(UnreachableError, match=r"accept returns False for in_scan also with all"):
        tune(in_scan, batches=[(X,)], policy=FP16, accept=lambda mixed: False, progress=False)


def test_a_program_that_nothing_is_lowered_in():
    with pytest.raises(UnreachableError, match="all 0 operations"):
        tune(lambda x: x + 1.0, batches=[(X,)], accept=lambda mixed: False, progress=False)


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
    policy, report = tuned(attention, batches, policy=BF16, argnums=0, tolerance=0.05)
    assert (policy, report.undetermined) == (BF16, 1)
    assert "left out    1 array, of which float32 knows too few digits" in str(report)
    assert report.error_before < 0.05


def test_an_array_that_is_left_out_has_to_be_finite():
    zero, small, big = (jnp.full(4, x, jnp.float32) for x in (0.0, 1.0, 1.02))
    known, of_zero = distances([small, zero], [big, small])
    assert worst([known, of_zero], [False, True]) == pytest.approx(0.02)
    assert worst([known, of_zero], [False, False]) == math.inf
    (lost,) = distances([zero], [small.at[0].set(jnp.nan)])
    assert worst([known, lost], [False, True]) == math.inf


def test_keys_and_integers_of_a_batch_stay():
    def model(key, w, i):
        noise = jax.random.normal(key, (8, 8))
        return jnp.tanh((w + 0.0 * noise) @ EYE)[i], noise

    batches = [(jax.random.key(0), X, np.int32(1))]
    policy, report = tuned(model, batches, policy=BF16, tolerance=0.05)
    assert (policy, report.undetermined) == (BF16, 0)


def test_where_float32_determines_nothing_everything_is_compared():
    def lost(x):
        return jnp.sum(jnp.exp(x @ EYE) - jnp.exp(x * (1 + 2**-22)), keepdims=True)

    policy, report = tuned(lost, [(X,)], policy=BF16, tolerance=0.05)
    assert report.undetermined == 0
    assert report.error_before > 0.05 >= report.error_after
    assert policy != BF16
