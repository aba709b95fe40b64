"""Keras 3 on the JAX backend needs no adapter: ``autocast(model.stateless_call)``."""

import functools
import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
import numpy as np
import pytest

from jmp_autocast import BF16, autocast, explain
from tests.support.jaxprs import assert_dots_run_in, dot_dtypes, trace
from tests.support.numerics import assert_trees_near

# Keras mixes dtypes where JAX promotes by default, and keeps tracers in its layers.
pytestmark = [
    pytest.mark.usefixtures("as_users_run_it"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype(np.float32)
Y = np.arange(32) % 3
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(cls=keras.Model):
    """Layers with parameters, statistics and a seed, the same at each call."""
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((8,))
    x = keras.layers.Dense(16, activation="relu", name="encoder")(inputs)
    x = keras.layers.Dropout(0.25)(keras.layers.BatchNormalization()(x))
    return cls(inputs, keras.layers.Dense(3, name="head")(x))


def values(variables):
    return [variable.value for variable in variables]


def state_of(model):
    return values(model.trainable_variables), values(model.non_trainable_variables)


def test_stateless_call():
    model = classifier()
    low = autocast(model.stateless_call, compute_dtype="bfloat16")
    assert_dots_run_in("bfloat16", trace(low, *state_of(model), X))
    got, want = (jax.jit(fn)(*state_of(model), X) for fn in (low, model.stateless_call))
    assert_trees_near(got, want, TOLERANCE["bfloat16"])


def test_scopes_are_the_names_of_layers():
    policy = BF16.with_scopes({"*/head": "float32"})
    model = classifier()
    low = autocast(model.stateless_call, policy=policy)
    dots = dot_dtypes(trace(low, *state_of(model), X))
    assert [dot[0] for dot in dots] == ["bfloat16", "float32"]
    report = explain(model.stateless_call, *state_of(model), X, policy=BF16)
    assert report.totals.low_share == 1
    assert not report.totals.unknown


# --- Keras's own training loop --------------------------------------------------------------


def fit(cast=None, optimizer=None, **options):
    """Losses, evaluation, prediction and variables of a training by `Model.fit`."""
    model = classifier()
    model.compile(optimizer=optimizer or keras.optimizers.Adam(1e-2), loss=LOSS, **options)
    if cast is not None:
        model.stateless_call = cast(model.stateless_call)
    history = model.fit(X, Y, epochs=3, batch_size=16, shuffle=False, verbose=0).history
    evaluation = model.evaluate(X, Y, verbose=0)
    return history["loss"], evaluation, model.predict(X, verbose=0), model


def bf16(fn):
    return autocast(fn, compute_dtype="bfloat16")


FITS = {
    "bfloat16": (bf16, None, {}),
    "eager": (bf16, None, {"run_eagerly": True}),
    "float16": (
        functools.partial(autocast, compute_dtype="float16"),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2)),
        {},
    ),
}


@functools.cache
def fitted_in_float32():
    return fit()


@pytest.mark.parametrize("name", FITS)
def test_fit_follows_float32(name):
    cast, optimizer, options = FITS[name]
    losses, evaluation, prediction, model = fit(cast, optimizer and optimizer(), **options)
    want_losses, want_evaluation, want_prediction, _ = fitted_in_float32()
    tolerance = TOLERANCE["float16" if name == "float16" else "bfloat16"]
    np.testing.assert_allclose(losses, want_losses, rtol=tolerance)
    assert losses != want_losses  # it was in 16 bits
    np.testing.assert_allclose(evaluation, want_evaluation, rtol=tolerance)
    assert prediction.dtype == "float32"
    np.testing.assert_allclose(prediction, want_prediction, atol=2 * tolerance)
    for variable in model.trainable_variables:
        assert variable.value.dtype == "float32"


class LowModel(keras.Model):
    """The same for all models of a class; argument 0 is the model itself."""

    stateless_call = autocast(keras.Model.stateless_call, compute_dtype="bfloat16", params=1)


def test_a_class_of_models():
    model = classifier(LowModel)
    assert_dots_run_in("bfloat16", trace(model.stateless_call, *state_of(model), X))
    model.compile(optimizer="sgd", loss=LOSS)
    (loss,) = model.fit(X, Y, batch_size=32, verbose=0).history["loss"]
    assert np.isfinite(loss)


def test_a_saved_model_is_the_plain_one(tmp_path):
    model = classifier()
    want = model.predict(X, verbose=0)
    model.stateless_call = bf16(model.stateless_call)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), want, rtol=1e-6)
