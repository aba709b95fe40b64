"""`tune(cost=)`: what is kept is what costs least, in at most 10 runs."""

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, FP16, autocast, tune
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


def test_a_ranking():
    ranking = ranked([1.0, 1.0, 3.0, float("inf")], [1.0, 0.0, 2.0, 9.0])
    assert ranking.order == (1, 3, 2, 0)
    assert ranking.error(1) == float("inf")
    assert ranking.error(2) == pytest.approx(10**0.5)
    assert ranking.cost(ranking.order[:3]) == 11.0
