"""`tune(cost=)`: what is kept is what costs least, in at most 10 runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, FP16, autocast, explain, explain_kept, keep_less, tune
from jmp_autocast.devices import as_device
from jmp_autocast.inspect.report.roofline import seconds_saved
from jmp_autocast.inspect.tuning.ranking import find_cheapest, ranked
from tests.support.tune_programs import X, big_square, pins

KEYS = jax.random.split(jax.random.key(0), 6)
BIG = jax.random.normal(KEYS[0], (1024, 1024))
TINY = jax.random.normal(KEYS[1], (8, 8))
pytestmark = pytest.mark.usefixtures("as_users_run_it")


def one_large_and_two_tiny(w, x):
    """Three products, of which any two lowered are too many: the large one, or two tiny ones."""

    with jax.named_scope("large"):
        y = x @ w
    parts = [jnp.ravel(y)[:64] / 18.8]
    for name, scale in (("tiny_0", 0.9), ("tiny_1", 0.9)):
        with jax.named_scope(name):
            parts.append(scale * jnp.ravel(TINY @ (TINY + scale)) / 3.0)
    return jnp.concatenate(parts)


def test_two_tiny_products_for_a_large_one():
    args = (BIG, jax.random.normal(KEYS[2], (1024, 1024)))
    full = one_large_and_two_tiny(*args)
    of = lambda kept: jax.jit(
        autocast(one_large_and_two_tiny, policy=BF16.with_scopes(dict.fromkeys(kept, "float32")))
    )(*args)
    error = lambda kept: float(jnp.linalg.norm(of(kept) - full) / jnp.linalg.norm(full))
    both, large = error(["tiny_0", "tiny_1"]), error(["large"])
    bound = 1.02 * max(both, large)
    assert min(map(error, ([], ["tiny_0"], ["tiny_1"]))) > bound
    options = dict(policy=BF16, tolerance=bound, progress=False, report=True)
    _, report = tune(one_large_and_two_tiny, *args, cost="time", device="H100", **options)
    assert pins(report) == [("tiny_0", "dot_general"), ("tiny_1", "dot_general")]
    _, fewest = tune(one_large_and_two_tiny, *args, **options)
    assert pins(fewest) == [("large", "dot_general")]
    assert report.error_after <= bound
    assert report.runs <= 10
    # 0.01 % of the FLOPs are in float32, and the curve says what more would cost.
    assert report.share_after > 0.9995
    assert report.cost_after < 0.01 * report.curve[-1].cost
    assert [point.kept for point in report.curve] == [0, 1, 2, 3]
    assert report.policy_at(0) == BF16
    assert report.policy_at(2) == report.policy
    assert "seconds that 16 bits save" in str(report)
    assert report.because == "what is kept costs less than 1 % of what 16 bits save"


def test_what_overflows_is_kept_whatever_it_costs():
    _, report = tune(
        big_square, X, policy=FP16, tolerance=0.05, cost="kept", progress=False, report=True
    )
    assert pins(report) == [("", "square")]
    assert report.curve[0].predicted == float("inf")


@pytest.mark.parametrize("tolerance", [0.02, None])
@pytest.mark.parametrize("needed", [{3}, {0, 7, 250}, set(range(0, 500, 9)), {499}])
def test_500_candidates_take_at_most_10_runs(needed, tolerance):
    """Nothing, everything, and the rest of the runs; also where the prediction is wrong."""
    errors = [1.0 if i in needed else 1e-4 for i in range(500)]
    ranking = ranked(errors, [1.0 + i % 7 for i in range(500)])
    tried = []

    def passes(kept):
        tried.append(kept)
        return needed <= kept

    kept = find_cheapest(ranking, tolerance, passes)
    assert needed <= set(kept)
    assert len(tried) <= 8
    if tolerance is not None:
        assert len(kept) <= len(needed) + 1


NAMES = ("first", "second")
PARAMS = {name: jax.random.normal(KEYS[i], (8, 8)) / 3 for i, name in enumerate(NAMES)}


def of_layers(params, x):
    for name in NAMES:
        with jax.named_scope(name):
            x = jax.nn.gelu(x @ params[name])
    return jnp.sum(x * x)


def test_bytes_are_those_that_the_backward_pass_keeps():
    _, report = tune(
        of_layers, PARAMS, X, policy=BF16, tolerance=1e-4, cost="kept", progress=False, report=True
    )
    mixed = keep_less(autocast(of_layers, policy=BF16), residuals="recompute")
    kept = [x for x in explain_kept(mixed, PARAMS, X).arrays if x.dtype == "bfloat16"]
    assert kept
    assert report.curve[-1].cost == sum(array.nbytes for array in kept)
    # What gelu makes on its way is computed again, and costs nothing.
    cost = dict(zip(report.order, np.diff([point.cost for point in report.curve]), strict=True))
    assert cost["first", "dot_general"] == X.size * 2
    assert report.because == "every operation is needed"
    assert cost["first", "tanh"] == 0


def test_seconds_are_those_of_the_report():
    options = dict(policy=BF16, device="H100")
    big = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    report = explain(of_layers, {name: big for name in PARAMS}, big, **options)
    (device,) = report.devices
    saved = seconds_saved(report.rows, as_device("H100"))
    products = [s for s, row in zip(saved, report.rows, strict=True) if row.flops > 1e9]
    assert sum(products) == pytest.approx(device.default_seconds - device.low_seconds, rel=0.05)
    assert max(saved) == max(products)


@jax.custom_vjp
def closed(x, w):
    with jax.named_scope("closed"):
        return jnp.tanh(x @ w)


closed.defvjp(
    lambda x, w: (closed(x, w), (x, w)),
    lambda kept, c: jax.vjp(lambda x, w: jnp.tanh(x @ w), *kept)[1](c),
)


def test_what_no_prediction_sees_is_told_and_is_not_free():
    fn = lambda params, x: closed(x, params["first"]) @ params["second"]
    options = dict(policy=BF16, tolerance=1e-4, cost="kept", progress=False, report=True)
    _, report = tune(fn, PARAMS, X, **options)
    assert report.unseen == 2
    assert "2 operations in kernels, rules or the backward pass" in str(report)
    left = {name: point for name, point in zip(report.order, report.curve, strict=False)}
    assert left["closed", "dot_general"].predicted > 0
    assert report.curve[-1].predicted == 0


@pytest.mark.parametrize(
    ("tolerance", "cost", "because"),
    [
        (0.5, "kept", "nothing is kept: what it starts from is good enough"),
        (1e-6, "time", "no gain on H100 SXM: too small: a kernel takes 2 us at least"),
        (1e-6, "kept", "the backward pass keeps nothing in 16 bits"),
    ],
)
def test_why_there_is_nothing_to_gain(tolerance, cost, because):
    product = lambda w, x: x @ w
    options = dict(policy=BF16, progress=False, report=True, device="H100")
    _, report = tune(product, PARAMS["first"], X / 3, tolerance=tolerance, cost=cost, **options)
    assert report.because == because
    assert because in str(report)


def test_a_ranking():
    ranking = ranked([1.0, 1.0, 3.0, float("inf"), float("nan")], [1.0, 0.0, 2.0, 9.0, 1e9])
    assert ranking.order == (3, 1, 2, 0, 4)
    assert (ranking.unseen, ranking.errors[4]) == (1, 3.0)
    ranking = ranked([1.0, 1.0, 3.0, float("inf")], [1.0, 0.0, 2.0, 9.0])
    assert ranking.error(0) == float("inf")
    assert ranking.error(2) == pytest.approx(10**0.5)
    assert ranking.cost(ranking.order[:3]) == 11.0
