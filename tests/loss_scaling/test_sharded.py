"""Loss scaling on eight devices: a bad shard skips the step everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast import dynamic_loss_scaling, scaled_value_and_grad, skipped_steps
from jmp_autocast.loss_scaling import loss_scale, step_skipped
from jmp_autocast.loss_scaling.unscale import all_finite
from tests.support.loss_scale_runs import skipping_by

DEVICES = 8
NAMES = ("data", "model")
# Growth on every second good step: ten steps hold growth, backoff and restarted counts.
BAD_STEPS = (2, 7)
SCALES = [1024, 2048, 1024, 1024, 2048, 2048, 4096, 2048, 2048, 4096]
BATCHES = np.random.default_rng(1).standard_normal((10, 16, 4)).astype(np.float32)


# optax computes the step count's powers with mixed dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def initial_weights():
    draw = np.random.default_rng(0).standard_normal
    return {"up": draw((4, 16)).astype(np.float32) / 2, "down": draw((16, 4)).astype(np.float32)}


def optimizer(axis_name=None):
    return dynamic_loss_scaling(
        optax.adam(0.05), init_scale=1024.0, growth_interval=2, axis_name=axis_name
    )


def loss(weights, x):
    return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] - x) ** 2)


def planted(grads, bad):
    """Puts an inf into one element, which lies on one shard where the gradients are sharded."""
    # Not .at[1, 2]: JAX 0.10 partitions that scatter wrongly.
    here = np.arange(grads["down"].size).reshape(grads["down"].shape) == 6
    return grads | {"down": jnp.where(bad & here, jnp.inf, grads["down"])}


def train_step(weights, state, x, bad, tx, loss=loss):
    _, grads = scaled_value_and_grad(loss)(state, weights, x)
    updates, state = tx.update(planted(grads, bad), state, weights)
    return optax.apply_updates(weights, updates), state


@functools.cache
def on_one_device():
    """Weights after each step, and the state after the last."""
    tx, weights, after = optimizer(), initial_weights(), []
    state, step = tx.init(weights), jax.jit(functools.partial(train_step, tx=tx))
    for i, x in enumerate(BATCHES):
        weights, state = step(weights, state, x, i in BAD_STEPS)
        after.append(weights)
    return after, state


def grid(axis_name, axis_type=AxisType.Auto):
    """Eight devices in a row, or in a grid where two axes are named."""
    shape, names = ((4, 2), NAMES) if isinstance(axis_name, tuple) else ((8,), NAMES[:1])
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def sliced(axis_name):
    return {"up": P(None, axis_name), "down": P(axis_name, None)}


WHOLE = {"up": P(), "down": P()}


def specs_like(state, weights):
    """Partition specs of an optimizer state: those of the weights wherever their tree recurs."""
    return optax.tree_map_params(
        optimizer(), lambda _, spec: spec, state, weights, transform_non_params=lambda _: P()
    )


def placed(tree, specs, mesh):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def place_all(mesh, weight_specs, tx):
    weights = initial_weights()
    state = tx.init(weights)
    state_specs = specs_like(state, weight_specs)
    return placed(weights, weight_specs, mesh), placed(state, state_specs, mesh), state_specs


def shard_map_slices(axis_name, check_vma):
    """Each device updates its own slice, and one alone sees the bad gradient."""
    tx = optimizer(axis_name)

    def gathered_loss(local, x):
        gather = functools.partial(lax.all_gather, axis_name=axis_name, tiled=True)
        whole = {"up": gather(local["up"], axis=1), "down": gather(local["down"], axis=0)}
        return loss(whole, x) / DEVICES

    def step(weights, state, x, bad):
        bad &= lax.axis_index(axis_name) == 5
        return train_step(weights, state, x, bad, tx, gathered_loss)

    return shard_mapped(step, tx, sliced(axis_name), axis_name, check_vma)


def shard_mapped(step, tx, weight_specs, axis_name, check_vma):
    mesh = grid(axis_name)
    weights, state, state_specs = place_all(mesh, weight_specs, tx)
    specs = (weight_specs, state_specs)
    ins = (*specs, P(axis_name), P())
    step = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=specs, check_vma=check_vma)
    return weights, state, jax.jit(step)


def jitted(specs, mesh, **jit_options):
    """The compiler partitions: no axis is named."""
    tx = optimizer()
    weights, state, _ = place_all(mesh, specs, tx)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names[0])))
    step = jax.jit(functools.partial(train_step, tx=tx), **jit_options)
    return weights, state, lambda w, s, x, bad: step(w, s, place(x), bad)


def explicit(specs):
    """Shardings are part of the types, so the program itself has to keep them."""
    mesh = grid("data", AxisType.Explicit)
    tx = optimizer()
    weights, state, _ = place_all(mesh, specs, tx)

    def explicit_loss(weights, x):
        up, down = (jax.reshard(weights[name], P()) for name in ("up", "down"))
        return loss({"up": up, "down": down}, x)

    @jax.jit
    def step(weights, state, x, bad):
        found = train_step(weights, state, x, bad, tx, explicit_loss)
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, (weights, state))
        return found

    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))

    def run(weights, state, x, bad):
        with jax.set_mesh(mesh):
            return step(weights, state, place(x), bad)

    return weights, state, run


BOTH = ("data", "model")
LAYOUTS = {
    "shard_map slices": functools.partial(shard_map_slices, "data", True),
    "shard_map slices, vma unchecked": functools.partial(shard_map_slices, "data", False),
    "shard_map slices, two axes": functools.partial(shard_map_slices, BOTH, True),
    "jit data parallel": lambda: jitted(WHOLE, grid("data")),
    "jit fully sharded": lambda: jitted(sliced("data"), grid("data"), donate_argnums=(0, 1)),
    "jit tensor parallel": lambda: jitted(sliced("model"), grid(BOTH)),
    "explicit fully sharded": lambda: explicit(sliced("data")),
}


def bits(tree):
    """Every shard of every leaf, with its place."""
    return [
        [
            (shard.device, shard.index, np.asarray(shard.data).tobytes())
            for shard in leaf.addressable_shards
        ]
        for leaf in map(jnp.asarray, jax.tree.leaves(tree))
    ]


def shardings(tree):
    return [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]


def values(scalar):
    """The set of the values that the shards of a scalar have."""
    return {float(x) for shard in scalar.addressable_shards for x in np.ravel(shard.data)}


# Each kind of mesh once by selection, as a TPU and a GPU skip.
SELECTED = (
    "shard_map slices, two axes",
    "jit fully sharded",
    "explicit fully sharded",
)
RUNS = [(name, "conditional") for name in LAYOUTS] + [(name, "selection") for name in SELECTED]


@pytest.mark.parametrize(("name", "way"), RUNS, ids=[", ".join(run) for run in RUNS])
def test_ten_steps_are_those_of_one_device(name, way):
    with skipping_by(way):
        assert_ten_steps_are_those_of_one_device(LAYOUTS[name])


def assert_ten_steps_are_those_of_one_device(layout):
    weights, state, step = layout()
    expected, expected_state = on_one_device()
    for i, x in enumerate(BATCHES):
        before, places = (bits(weights), bits(state.inner_state)), shardings((weights, state))
        weights, state = step(weights, state, x, np.bool_(i in BAD_STEPS))
        after = bits(weights), bits(state.inner_state)
        assert values(loss_scale(state)) == {SCALES[i]}
        assert values(step_skipped(state)) == {i in BAD_STEPS}
        if i in BAD_STEPS:
            assert after == before
        for old, leaf in zip(places, jax.tree.leaves((weights, state)), strict=True):
            assert old is None or leaf.sharding.is_equivalent_to(old, leaf.ndim)
        for name, leaf in weights.items():
            found = np.asarray(leaf).reshape(-1, *expected[i][name].shape)
            np.testing.assert_allclose(
                found, np.broadcast_to(expected[i][name], found.shape), rtol=1e-4, atol=1e-5
            )
    assert values(skipped_steps(state)) == {len(BAD_STEPS)}
    for found, leaf in zip(state.loss_scale, expected_state.loss_scale, strict=True):
        assert values(found) == {float(leaf)}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_a_scaled_loss_in_shard_map(check_vma, dtype):
    """They are summed over the axis, by ``psum`` or by JAX where it tracks what varies."""
    mesh, weights, x = grid("data"), initial_weights(), BATCHES[0]
    scale = 2.0**17  # more than a float16 cotangent holds

    def local_loss(weights, x):
        return (loss(weights, x) / DEVICES).astype(dtype)

    def local(scale, weights, x):
        value, grads = scaled_value_and_grad(local_loss)(scale, weights, x)
        assert value.dtype == dtype
        value = lax.psum(value.astype(jnp.float32), "data")
        return value, grads if check_vma else lax.psum(grads, "data")

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    found = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(jnp.float32(scale), weights, x)
    value, grads = jax.value_and_grad(loss)(weights, x)
    np.testing.assert_allclose(found[0], value, rtol=1e-6 if dtype == jnp.float32 else 1e-3)
    for name, leaf in grads.items():
        np.testing.assert_allclose(found[1][name] / scale, leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", [4.0, 0.99])
def test_sums_over_shards_that_overflow_do_not_decide(scale, bad):
    mesh = grid("data")
    grads = np.full((16, 3), 3e38, np.float32)
    if bad is not None:
        grads[13, 1] = bad
    scale = jnp.float32(scale)
    named = jax.shard_map(
        lambda g: all_finite(scale, g, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    for check in (lambda g: all_finite(scale, g, None), named):
        finite = jax.jit(check)(jax.device_put(grads, NamedSharding(mesh, P("data"))))
        assert values(finite) == {bad is None}
