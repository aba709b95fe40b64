"""The scale and the skips are found wherever they are nested; other state can be held back."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from jmp_autocast import (
    LossScale,
    dynamic_loss_scaling,
    loss_scale,
    scaled_value_and_grad,
    select_on_finite,
    skipped_steps,
    static_loss_scaling,
    step_skipped,
)

READERS = [loss_scale, step_skipped, skipped_steps]
WRAPPED = dynamic_loss_scaling(optax.sgd(0.5), init_scale=8.0)
LABELS = {"a": "x", "b": "y"}

NESTINGS = {
    "bare": WRAPPED,
    "static": static_loss_scaling(optax.sgd(0.5), 8.0),
    "chain": optax.chain(optax.identity(), WRAPPED, optax.scale(1.0)),
    "chain of chains": optax.chain(optax.chain(optax.chain(WRAPPED))),
    "named_chain": optax.named_chain(("first", optax.identity()), ("scaled", WRAPPED)),
    "masked": optax.masked(WRAPPED, {"a": True, "b": True}),
    "partition": optax.partition({"x": WRAPPED, "y": optax.set_to_zero()}, LABELS),
    "MultiSteps": optax.MultiSteps(WRAPPED, 1).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(WRAPPED, 0),
    "flatten": optax.flatten(WRAPPED),
    "inject_hyperparams": optax.inject_hyperparams(
        dynamic_loss_scaling, static_args=("inner", "axis_name")
    )(optax.sgd(0.5), init_scale=8.0),
}


@pytest.mark.filterwarnings("ignore:optax.MultiSteps stands around")
@pytest.mark.parametrize("nesting", NESTINGS)
def test_all_nestings(nesting):
    tx = NESTINGS[nesting]
    params = {"a": np.ones(2, np.float32), "b": np.ones([], np.float32)}

    @jax.jit
    def run(bad):
        state = tx.init(params)
        _, after = tx.update(bad, state, params)
        return [[read(s) for read in READERS] for s in (state, after)]

    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
        before, after = run({"a": np.array([1, np.nan], np.float32), "b": params["b"]})
    assert [leaf.dtype for leaf in before] == [jnp.float32, bool, jnp.int32]
    assert [leaf.item() for leaf in before] == [8.0, False, 0]
    assert [leaf.item() for leaf in after] == [8.0 if nesting == "static" else 4.0, True, 1]


def test_a_flax_train_state():
    model = linen.Dense(1)
    x = np.ones((4, 3), np.float32)
    with jax.numpy_dtype_promotion("standard"):
        state = TrainState.create(
            apply_fn=model.apply, params=model.init(jax.random.key(0), x), tx=WRAPPED
        )

        @jax.jit
        def step(state, x):
            def loss(params):
                return jnp.mean(state.apply_fn(params, x) ** 2)

            value, grads = scaled_value_and_grad(loss)(state, state.params)
            return state.apply_gradients(grads=grads), value

        assert float(loss_scale(state)) == 8.0
        trained, _ = step(state, x)
        skipped, _ = step(trained, x * np.inf)
    assert [read(skipped).item() for read in READERS] == [4.0, True, 1]
    jax.tree.map(np.testing.assert_array_equal, skipped.params, trained.params)
    assert not np.array_equal(state.params["params"]["kernel"], trained.params["params"]["kernel"])


def test_an_nnx_optimizer():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, WRAPPED, wrt=nnx.Param)
    assert [read(optimizer).item() for read in READERS] == [8.0, False, 0]
    assert [read(optimizer.opt_state).item() for read in READERS] == [8.0, False, 0]

    @nnx.jit
    def step(model, optimizer, x):
        graph, params = nnx.split(model)

        def loss(params):
            return jnp.mean(nnx.merge(graph, params)(x) ** 2)

        _, grads = scaled_value_and_grad(loss)(optimizer, params)
        optimizer.update(model, grads)
        return step_skipped(optimizer)

    x = np.ones((4, 3), np.float32)
    assert not step(model, optimizer, x)
    kernel = np.asarray(model.kernel[...])
    assert step(model, optimizer, x * np.inf)
    assert [read(optimizer).item() for read in READERS] == [4.0, True, 1]
    np.testing.assert_array_equal(model.kernel[...], kernel)


NONE = (
    "No loss scale in this state (a {}). It must come from the init of an optimizer that "
    "contains dynamic_loss_scaling(...) or static_loss_scaling(...)."
)


@pytest.mark.parametrize("read", [*READERS, lambda s: scaled_value_and_grad(jnp.sum)(s, 1.0)])
@pytest.mark.parametrize(
    ("state", "name"),
    [
        (optax.adam(1e-3).init(np.ones(2, np.float32)), "tuple"),
        (None, "NoneType"),
        ({}, "dict"),
        ("state", "str"),
        (WRAPPED, "GradientTransformationExtraArgs"),
    ],
    ids=["adam", "none", "dict", "str", "transformation"],
)
def test_no_scale(read, state, name):
    with pytest.raises(ValueError, match="^" + re.escape(NONE.format(name)) + "$"):
        read(state)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("nesting", ["chain", "partition", "nested"])
def test_two_scales(read, nesting):
    tx = {
        "chain": optax.chain(WRAPPED, WRAPPED),
        "partition": optax.partition({"x": WRAPPED, "y": WRAPPED}, LABELS),
        "nested": dynamic_loss_scaling(WRAPPED),
    }[nesting]
    places = {
        "chain": "[0].loss_scale, [1].loss_scale",
        "partition": ".inner_states['x'].inner_state.loss_scale, "
        ".inner_states['y'].inner_state.loss_scale",
        "nested": ".loss_scale, .inner_state.loss_scale",
    }[nesting]
    expected = (
        f"2 loss scales in this state, at {places}. Pass the part that holds the one you mean, or "
        "put one dynamic_loss_scaling around the whole optimizer."
    )
    with pytest.raises(ValueError, match="^" + re.escape(expected) + "$"):
        read(tx.init({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}))


def test_the_part_of_a_state_that_holds_one_scale_is_enough():
    state = optax.chain(WRAPPED, static_loss_scaling(optax.identity(), 3.0)).init(np.ones(2))
    assert [float(loss_scale(part)) for part in state] == [8.0, 3.0]


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (np.ones(1, np.float32), "array of shape (1,) and dtype float32"),
        (np.array(True), "array of shape () and dtype bool"),
        (True, "array of shape () and dtype bool"),
    ],
    ids=str,
)
def test_a_scale_that_is_no_number(scale, found):
    expected = (
        f"scale must be a number, an array of shape () or an optimizer state; got an {found}."
    )
    with pytest.raises(ValueError, match="^" + re.escape(expected) + "$"):
        scaled_value_and_grad(jnp.sum)(scale, 1.0)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("jit", [False, True])
def test_select_on_finite_keeps_every_bit(finite, jit):
    old = {
        "zero": np.float32(-0.0),
        "nan": np.array([0x7FC12345], np.uint32).view(np.float32),  # a NaN with a payload
        "tiny": np.float32(2.0**-149),
        "half": np.array([1, -2], np.float16),
        "count": np.int32(7),
        "none": None,
        "masked": optax.MaskedNode(),
        "key": jax.random.key(1),
    }
    new = {**old, "zero": np.float32(0.0), "count": np.int32(8), "key": jax.random.key(2)}
    select = jax.jit(select_on_finite) if jit else select_on_finite
    out, expected = select(np.bool_(finite), new, old), new if finite else old
    assert out["none"] is None
    assert out["masked"] == optax.MaskedNode()
    for name in ("zero", "nan", "tiny", "half", "count"):
        assert out[name].dtype == expected[name].dtype
        assert np.asarray(out[name]).tobytes() == expected[name].tobytes(), name
    assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)
    assert jax.random.key_data(out["key"]).tolist() == jax.random.key_data(expected["key"]).tolist()


def array(dtype, *shape):
    return np.zeros(shape, dtype)


MISMATCHES = [
    ({"a": array("float32", 2)}, {"b": array("float32", 2)}, "PyTreeDef({'a': *}) and old a"),
    ([array("float32")], [array("float32"), array("float32")], "PyTreeDef([*]) and old a"),
    ({"a": array("float32")}, {"a": None}, "old a PyTreeDef({'a': None})."),
    (array("float32"), {"a": array("float32")}, "new is a PyTreeDef(*) and old a"),
    ((array("float32"),), [array("float32")], "PyTreeDef((*,)) and old a PyTreeDef([*])."),
    (
        {"a": array("float16", 2)},
        {"a": array("float32", 2)},
        "shape and dtype, but at ['a'] new is float16[2] and old is float32[2].",
    ),
    (
        {"a": [array("float32", 3)]},
        {"a": [array("float32", 2)]},
        "shape and dtype, but at ['a'][0] new is float32[3] and old is float32[2].",
    ),
    (
        array("int32"),
        array("float32"),
        "shape and dtype, but at  new is int32[] and old is float32[].",
    ),
]


@pytest.mark.parametrize(("new", "old", "message"), MISMATCHES, ids=lambda value: None)
def test_select_on_finite_refuses_trees_that_differ(new, old, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        select_on_finite(True, new, old)


def test_select_on_finite_broadcasts_nothing_under_vmap():
    finite = np.array([True, False])
    new, old = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    out = jax.vmap(functools.partial(select_on_finite))(finite, new, old)
    assert out.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_reading_works_on_a_state_restored_as_numpy():
    state = jax.device_get(LossScale.dynamic(8.0).adjust(False))
    assert [read({"x": [state]}).item() for read in READERS] == [4.0, True, 1]
