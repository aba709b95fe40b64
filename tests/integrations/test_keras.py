"""Keras 3 on the JAX backend: ``autocast(model.stateless_call)``, and a policy that is saved."""

import functools
import subprocess
import sys

from jmp_autocast.integrations.keras import AutocastPolicy, autocast as keras_autocast  # isort: skip
import keras  # the backend is that of the integration
import numpy as np
import pytest

from jmp_autocast import BF16, autocast, explain
from tests.support.jaxprs import dot_dtypes, trace

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


def test_scopes_are_the_names_of_layers():
    policy = BF16.with_rules({"*": "float32"}, scope="*/head")
    model = classifier()
    low = autocast(model.stateless_call, policy=policy)
    dots = dot_dtypes(trace(low, *state_of(model), X))
    assert [dot[0] for dot in dots] == ["bfloat16", "float32"]
    report = explain(model.stateless_call, *state_of(model), X, policy=BF16)
    assert report.totals.low_share == 1
    assert not report.totals.unknown


# --- Keras's own training loop --------------------------------------------------------------


OPTIONS = {"batch_size": 16, "shuffle": False, "verbose": 0}


def fit(policy=None):
    """Losses, evaluation, prediction and model of a training by `Model.fit`."""
    model, optimizer = classifier(), keras.optimizers.Adam(1e-2)
    if policy is not None:
        keras_autocast(model, policy)
    if policy == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss=LOSS)
    losses = model.fit(X, Y, epochs=3, **OPTIONS).history["loss"]
    return losses, model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0), model


@functools.cache
def fitted_in_float32():
    return fit()


@pytest.mark.parametrize("name", TOLERANCE)
def test_fit_follows_float32_and_goes_on_after_loading(name, tmp_path):
    losses, evaluation, prediction, model = fit(name)
    want_losses, want_evaluation, want_prediction, _ = fitted_in_float32()
    np.testing.assert_allclose(losses, want_losses, rtol=TOLERANCE[name])
    assert losses != want_losses  # it was in 16 bits
    np.testing.assert_allclose(evaluation, want_evaluation, rtol=TOLERANCE[name])
    assert prediction.dtype == "float32"
    np.testing.assert_allclose(prediction, want_prediction, atol=2 * TOLERANCE[name])
    for variable in model.trainable_variables:
        assert variable.value.dtype == "float32"
    loaded = reloaded(model, tmp_path)
    assert type(loaded.optimizer) is type(model.optimizer)
    pairs = zip(loaded.optimizer.variables, model.optimizer.variables, strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
    assert loaded.fit(X, Y, epochs=1, **OPTIONS).history["loss"][0] < losses[0]


# --- the policy that is saved with a model --------------------------------------------------


def dtypes_of(model):
    return [dot[0] for dot in dot_dtypes(trace(model.stateless_call, *state_of(model), X))]


def reloaded(model, tmp_path):
    model.save(tmp_path / "model.keras")
    return keras.models.load_model(tmp_path / "model.keras")


def test_a_wrapped_call_is_no_part_of_a_saved_model(tmp_path):
    model = classifier()
    want = model.predict(X, verbose=0)
    model.stateless_call = autocast(model.stateless_call, "bfloat16")
    assert dtypes_of(model) == ["bfloat16"] * 2
    loaded = reloaded(model, tmp_path)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), want, rtol=1e-6)


@keras.saving.register_keras_serializable("tests")
class Own(keras.Model):
    """A model of a user, with layers that have layers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(2, 8)
        self.head = keras.layers.Dense(3)

    def call(self, x):
        x = keras.ops.repeat(keras.ops.expand_dims(x, 1), 8, axis=1)
        return self.head(self.attention(x, x)[:, 0])


def own():
    model = Own()
    model(X)
    return model


MODELS = {"functional": (classifier, 2), "a class": (own, 7)}


@pytest.mark.parametrize("name", MODELS)
def test_one_switch_for_a_model_that_is_saved_with_it(name, tmp_path):
    make, products = MODELS[name]
    model = make()
    before = dtypes_of(model)
    assert keras_autocast(model) is model
    assert dtypes_of(model) == ["bfloat16"] * products
    loaded = reloaded(model, tmp_path)
    assert dtypes_of(loaded) == ["bfloat16"] * products
    got, want = (each.predict(X, verbose=0) for each in (loaded, model))
    np.testing.assert_array_equal(got, want)
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    keras_autocast(model, enabled=False)
    assert dtypes_of(model) == before == ["float32"] * products


def test_all_of_a_policy_is_saved(tmp_path):
    policy = BF16.with_rules({"*": "float32"}, scope="*/head").with_rules({"tanh": "fp32"})
    loaded = reloaded(keras_autocast(classifier(), policy=policy), tmp_path)
    found = loaded.get_layer("head").dtype_policy
    assert found == AutocastPolicy(policy) != AutocastPolicy()
    assert found.policy == policy
    assert dtypes_of(loaded) == ["bfloat16", "float32"]
    with pytest.raises(TypeError, match="rule for primitive 'tanh' is a function"):
        keras_autocast(classifier(), policy=BF16.with_rules({"tanh": lambda eqn: "FP32"}))


@pytest.fixture
def dtype_policy():
    """Sets the dtype policy of layers that are made in a test."""
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy("float32")


def test_models_that_are_yet_to_be_made(dtype_policy):
    dtype_policy(AutocastPolicy("float16"))
    assert dtypes_of(classifier()) == ["float16"] * 2
    inputs = keras.layers.Input((8,))
    hidden = keras.layers.Dense(16)(inputs)
    head = keras.layers.Dense(3, name="head", dtype="float32")
    # Its own dtype says float32, as under "mixed_float16".
    assert dtypes_of(keras.Model(inputs, head(hidden))) == ["float16", "float32"]
    dtype_policy("float32")
    model = classifier()
    model.dtype_policy = AutocastPolicy()  # of the model alone: its layers say nothing
    assert dtypes_of(model) == ["bfloat16"] * 2
    assert dtypes_of(classifier()) == ["float32"] * 2


def test_a_layer_is_pinned_and_set_free_by_its_own_dtype_policy():
    model = keras_autocast(classifier())
    model.get_layer("head").dtype_policy = "float32"
    assert dtypes_of(model) == ["bfloat16", "float32"]
    assert dtypes_of(keras_autocast(model, policy="bfloat16")) == ["bfloat16"] * 2
    model.get_layer("head").dtype_policy = AutocastPolicy("float16")
    with pytest.raises(
        ValueError, match=r"one policy, and layers of 'functional.*'head' has Policy"
    ):
        dtypes_of(model)


def test_a_training_in_float16_without_a_loss_scale_warns():
    model = keras_autocast(classifier(), "float16")
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=LOSS)
    with pytest.warns(
        UserWarning, match="trains in float16, and its optimizer Adam scales no loss"
    ):
        model.fit(X, Y, epochs=1, verbose=0)


def test_wrong_use_says_what_to_do():
    with pytest.raises(TypeError, match=r"takes a keras.Model, got .*jmp_autocast.autocast for"):
        keras_autocast(classifier)
    with pytest.raises(ValueError, match="float16"):
        keras_autocast(classifier(), "float8")
    assert repr(AutocastPolicy("float16")) == "AutocastPolicy(Policy(float16))"
    assert bool(AutocastPolicy())


@pytest.mark.process
def test_another_backend_is_an_error_that_says_so():
    program = (
        "import sys, types; keras = sys.modules['keras'] = types.ModuleType('keras');"
        "keras.backend = types.SimpleNamespace(backend=lambda: 'torch');"
        "import jmp_autocast.integrations.keras"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "runs on torch. Set the environment variable KERAS_BACKEND=jax" in done.stderr
