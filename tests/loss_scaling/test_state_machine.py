"""The scale moves as that of PyTorch's GradScaler, within bounds."""

import dataclasses
import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast.loss_scaling.scale import adjusted, static_scale
from tests.support.loss_scale_runs import dynamic


def float32(value: float) -> float:
    """Rounds to the nearest float32; what is too large becomes infinite."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf


@dataclasses.dataclass
class GradScalerModel:
    """What `torch.amp.GradScaler.update` of PyTorch 2.13 does to its scale, in plain Python."""

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0

    def update(self, found_inf: bool) -> float:
        if found_inf:
            self.scale = float32(self.scale * self.backoff_factor)
            self.growth_tracker = 0
            return self.scale
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            grown = float32(self.scale * self.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self.growth_tracker = 0
        return self.scale


WIDE_OPEN = {"min_scale": float(np.finfo(np.float32).tiny), "max_scale": 3.4e38}
MAX_INT32 = np.iinfo(np.int32).max


@jax.jit
def sequence(state, pattern):
    """The states after each step of a pattern of finite (True) and bad (False) steps."""

    def step(state, finite):
        state = adjusted(state, finite)
        return state, state

    return jax.lax.scan(step, state, pattern)[1]


sequences = jax.jit(jax.vmap(sequence, in_axes=(None, 0)))


def model_sequences(patterns, **configuration):
    """Of the model. Factors have to be exact in float32: PyTorch's are double."""
    scales = np.empty(patterns.shape, np.float64)
    trackers = np.empty(patterns.shape, np.int64)
    for row, pattern in enumerate(patterns.tolist()):
        model = GradScalerModel(**configuration)
        for column, finite in enumerate(pattern):
            scales[row, column] = model.update(not finite)
            trackers[row, column] = model.growth_tracker
    return scales, trackers


def random_patterns(rng, count, steps):
    """Rates of bad steps from none to nearly all, so that long runs of both kinds occur."""
    bad = rng.random(count) ** 3
    return rng.random((count, steps)) >= bad[:, None]


@pytest.mark.parametrize(
    ("count", "steps", "configuration"),
    [
        (4000, 100, {"growth_interval": 1}),
        (3000, 100, {"growth_interval": 3}),
        (1000, 100, {"growth_interval": 7, "growth_factor": 1.6875, "backoff_factor": 0.3125}),
        (1000, 100, {"growth_interval": 2, "growth_factor": 16.0, "backoff_factor": 0.0625}),
        (900, 200, {"growth_interval": 20, "growth_factor": 1.125, "backoff_factor": 0.875}),
        (100, 5000, {}),
    ],
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, dict) else None,
)
def test_10000_random_patterns_give_the_scales_of_pytorch(count, steps, configuration):
    rng = np.random.default_rng(steps + count)
    patterns = random_patterns(rng, count, steps)
    if not configuration:  # the default interval of 2000: few bad steps, at random places
        patterns = rng.random((count, steps)) >= rng.choice([0, 1e-4, 3e-4, 1e-3], (count, 1))
    states = sequences(dynamic(**configuration, **WIDE_OPEN), patterns)
    scales, trackers = model_sequences(patterns, **configuration)
    # The model has no bounds: from where it leaves the normal float32 numbers on, ours differs.
    inside = np.logical_and.accumulate(
        (scales >= WIDE_OPEN["min_scale"]) & (scales <= WIDE_OPEN["max_scale"]), axis=1
    )
    assert inside.mean() > 0.5
    np.testing.assert_array_equal(np.asarray(states.scale)[inside], scales[inside])
    np.testing.assert_array_equal(states.good_steps, trackers)
    np.testing.assert_array_equal(states.skipped_steps, np.cumsum(~patterns, axis=1))
    changes = np.diff(np.asarray(states.scale), axis=1) != 0
    assert changes.any(axis=1).mean() > 0.5


def test_the_defaults_are_those_of_pytorch():
    state, model = dynamic(), GradScalerModel()
    assert float(state.scale) == model.scale
    assert float(state.growth_factor) == model.growth_factor
    assert float(state.backoff_factor) == model.backoff_factor
    assert int(state.growth_interval) == model.growth_interval
    assert (float(state.min_scale), float(state.max_scale)) == (1.0, 2.0**24)


def test_growth_stops_at_max_scale_and_backoff_at_min_scale():
    state = dynamic(4.0, growth_interval=1, growth_factor=3.0, min_scale=1.5, max_scale=50)
    assert np.asarray(sequence(state, np.ones(4, bool)).scale).tolist() == [12, 36, 50, 50]
    assert np.asarray(sequence(state, np.zeros(3, bool)).scale).tolist() == [2, 1.5, 1.5]


def test_a_scale_above_max_scale_comes_down_when_it_would_grow():
    """A restored scale may lie above a bound that was lowered, also where growing overflows."""
    for high in (3e38, 2.0**30):
        state = dynamic(growth_interval=2)._replace(scale=jnp.float32(high))
        scales = np.asarray(sequence(state, np.ones(3, bool)).scale)
        assert scales.tolist() == [np.float32(high), 2.0**24, 2.0**24]


def test_an_interval_lowered_below_the_count_still_grows():
    state = dynamic(growth_interval=10)
    for _ in range(6):
        state = adjusted(state, np.True_)
    state = adjusted(state._replace(growth_interval=jnp.int32(4)), np.True_)
    assert (float(state.scale), int(state.good_steps)) == (2.0**17, 0)


@pytest.mark.parametrize("as_field", [jnp.int32, np.int32, int], ids=["jax", "numpy", "python"])
def test_counters_saturate(as_field):
    full = as_field(MAX_INT32)
    state = dynamic()._replace(consecutive_skips=full, skipped_steps=full)
    state = adjusted(state, np.False_)
    assert int(state.consecutive_skips) == int(state.skipped_steps) == MAX_INT32
    state = dynamic(growth_interval=MAX_INT32)._replace(good_steps=full)
    state = adjusted(state, np.True_)
    assert (int(state.good_steps), float(state.scale)) == (0, 2.0**17)


def test_consecutive_skips_restart_after_a_good_step_and_skipped_steps_do_not():
    pattern = np.array([0, 0, 1, 0, 1, 1, 0, 0, 0], bool)
    states = sequence(dynamic(), pattern)
    assert np.asarray(states.consecutive_skips).tolist() == [1, 2, 0, 1, 0, 0, 1, 2, 3]
    assert np.asarray(states.skipped_steps).tolist() == [1, 2, 2, 3, 3, 3, 4, 5, 6]


def test_a_static_scale_never_moves():
    states = sequence(static_scale(128.0), np.array([0, 1, 1, 0, 0, 1], bool))
    assert (np.asarray(states.scale) == 128.0).all()
    assert np.asarray(states.skipped_steps).tolist() == [1, 1, 1, 2, 3, 3]
    nearly = static_scale(3e38)._replace(good_steps=jnp.int32(MAX_INT32 - 1))
    assert (np.asarray(sequence(nearly, np.ones(3, bool)).scale) == np.float32(3e38)).all()
