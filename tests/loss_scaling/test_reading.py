"""The scale and the skips are found wherever they are nested; other state can be held back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import (
    LossScale,
    dynamic_loss_scaling,
    loss_scale,
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


def test_the_part_of_a_state_that_holds_one_scale_is_enough():
    state = optax.chain(WRAPPED, static_loss_scaling(optax.identity(), 3.0)).init(np.ones(2))
    assert [float(loss_scale(part)) for part in state] == [8.0, 3.0]


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


def test_select_on_finite_broadcasts_nothing_under_vmap():
    finite = np.array([True, False])
    new, old = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    out = jax.vmap(functools.partial(select_on_finite))(finite, new, old)
    assert out.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_reading_works_on_a_state_restored_as_numpy():
    state = jax.device_get(LossScale.dynamic(8.0).adjust(False))
    assert [read({"x": [state]}).item() for read in READERS] == [4.0, True, 1]
