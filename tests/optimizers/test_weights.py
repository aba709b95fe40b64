"""Weights in 16 bits train: as float32 ones to the bit, or nearly so with fewer bytes."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast import BF16, Policy, autocast, dynamic_loss_scaling, scaled_value_and_grad
from jmp_autocast.loss_scaling import step_skipped
from jmp_autocast.optimizers import (
    as_float32,
    float32_params,
    kahan_summation,
    master_weights,
    start_from,
    stochastic_rounding,
)

SCHEMES = {
    "master": master_weights,
    "kahan": kahan_summation,
    "stochastic": stochastic_rounding,
}
HALF = ("float16", "bfloat16")
# LLVM makes one operation of a product and a sum in one program, and two in another: what is to
# agree to the bit is compiled without that.
ALIKE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def weights():
    rng = np.random.default_rng(0)
    return {
        "up": jnp.asarray(rng.normal(size=(8, 32)) / 3, jnp.float32),
        "scale": jnp.ones(32),
        "down": jnp.asarray(rng.normal(size=(32, 8)) / 6, jnp.float32),
    }


def stored(params, dtype):
    """The matrices in 16 bits; the scale, which is read in float32, as it is."""
    return {name: p.astype(dtype) if p.ndim > 1 else p for name, p in params.items()}


def loss(params, x):
    h = x @ params["up"]
    h = jnp.tanh(h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * params["scale"])
    return jnp.mean((h @ params["down"] - x[..., ::-1]) ** 2)


BATCHES = np.random.default_rng(1).standard_normal((12, 16, 8)).astype(np.float32)


def trained(tx, params, state, dtype, batches=BATCHES):
    """Parameters and state after all batches of a scaled run."""
    scaled_loss = autocast(loss, policy=Policy(dtype))

    def step(carry, x):
        params, state = carry
        _, grads = scaled_value_and_grad(scaled_loss)(state, as_float32(params), x)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda *carry: jax.lax.scan(step, carry, batches)[0])(params, state)


INNER = {
    "adamw": lambda: optax.adamw(0.02, weight_decay=0.1),
    "clipped sgd in MultiSteps": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)), 2
    ),
}


@pytest.mark.parametrize(("name", "dtype"), [*zip(INNER, HALF, strict=True)])
def test_master_weights_train_as_float32_weights_do_to_the_bit(name, dtype):
    inner, params = INNER[name](), weights()
    plain, own = dynamic_loss_scaling(inner), dynamic_loss_scaling(master_weights(inner))
    batches = BATCHES.copy()
    batches[5, 0, 0] = np.inf  # a skipped step

    def run(tx, *start):
        alike = lambda *start: trained(tx, *start, dtype, batches)
        return jax.jit(alike, compiler_options=ALIKE)(*start)

    expected, _ = run(plain, params, plain.init(params))
    small = stored(params, dtype)
    found, state = run(own, small, start_from(own.init(small), small, params))
    jax.tree.map(np.testing.assert_array_equal, float32_params(state, found), expected)
    jax.tree.map(np.testing.assert_array_equal, found, stored(expected, dtype))
    assert {name: p.dtype.name for name, p in found.items()} == {
        "up": dtype,
        "scale": "float32",
        "down": dtype,
    }


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["alone", *SCHEMES])
def test_updates_below_the_distance_of_neighbors_add_up(name, dtype):
    tx = SCHEMES.get(name, lambda inner: inner)(optax.sgd(1e-4))
    params = jnp.ones((64, 64), dtype)

    def step(carry, _):
        updates, state = tx.update(jnp.ones_like(params), carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    final, _ = jax.jit(lambda c: jax.lax.scan(step, c, length=100))((params, tx.init(params)))[0]
    assert final.dtype == dtype
    # The nearest bfloat16 number to 0.99 is 1.4e-3 away from it; the mean of 4,096 stochastic
    # ones has a standard error of 3e-5.
    moved = 1 if name == "alone" else 0.99
    spread = {"stochastic": 2e-4, "alone": 0}.get(name, 2e-3)
    np.testing.assert_allclose(np.mean(np.float64(final)), moved, atol=spread)


@pytest.mark.parametrize("dtype", HALF)
def test_a_compensation_holds_nine_more_bits(dtype):
    params = np.random.default_rng(2).standard_normal(512).astype(np.float32)
    small = jnp.asarray(params, dtype)
    tx = kahan_summation(optax.sgd(1.0))
    state = start_from(tx.init(small), small, params)
    np.testing.assert_allclose(float32_params(state, small), params, rtol=2.0**-17)
    moves = jnp.asarray(params * 1e-4)
    for k in range(1, 5):
        updates, state = tx.update(-moves, state, small)
        small = optax.apply_updates(small, updates)
        exact = params * (1 + k * 1e-4)
        np.testing.assert_allclose(float32_params(state, small), exact, rtol=(k + 1) * 2.0**-17)


@pytest.mark.parametrize("name", ["stochastic", "master"])
def test_a_skipped_step_leaves_weights_and_state_alone(name):
    tx = dynamic_loss_scaling(SCHEMES[name](optax.adam(0.1)))
    params = stored(weights(), "float16")
    before = params, jax.jit(tx.init)(params)
    after = trained(tx, *before, "float16", np.full((1, 16, 8), np.nan, np.float32))
    assert step_skipped(after[1])
    changed = before[0], before[1].inner_state
    jax.tree.map(np.testing.assert_array_equal, (after[0], after[1].inner_state), changed)


@pytest.mark.parametrize("name", ["stochastic", "master"])
def test_a_run_goes_on_from_a_checkpoint(name, tmp_path):
    tx = dynamic_loss_scaling(SCHEMES[name](optax.adam(0.05)), init_scale=256.0)
    fresh = jax.jit(lambda params: (params, tx.init(params)))(stored(weights(), "bfloat16"))
    run = jax.jit(functools.partial(trained, tx, dtype="bfloat16"))
    half = run(*fresh, batches=BATCHES[:6])
    expected = run(*half, batches=BATCHES[6:])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", fresh)
    host = jax.device_get(half)
    from_bytes = serialization.from_bytes(fresh, serialization.to_bytes(host))
    for start in (restored, pickle.loads(pickle.dumps(host)), from_bytes):
        end = run(*start, batches=BATCHES[6:])
        jax.tree.map(np.testing.assert_array_equal, end, expected)


@pytest.mark.parametrize("name", ["kahan", "stochastic"])
def test_sharded_weights_get_the_same_bits_and_keep_their_sharding(name):
    tx = SCHEMES[name](optax.adam(0.05))
    params = stored(weights(), "bfloat16")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    split = {"up": P(None, "d"), "scale": P(), "down": P("d")}
    shards = {name: NamedSharding(mesh, spec) for name, spec in split.items()}

    @functools.partial(jax.jit, compiler_options=ALIKE)
    def steps(params):
        state = tx.init(params)
        for k in range(2):
            grads = jax.tree.map(lambda p, k=k: jnp.sin(as_float32(p) * 9 + k), params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    found = steps(jax.device_put(params, shards))
    jax.tree.map(np.testing.assert_array_equal, found, steps(params))
    assert all(found[0][name].sharding.is_equivalent_to(shards[name], 2) for name in ("up", "down"))


def test_a_step_may_donate_parameters_and_state():
    for make in (master_weights, kahan_summation, stochastic_rounding):
        # A step that runs deletes what it got, so that each has weights of its own.
        params = stored(weights(), "bfloat16")
        tx = make(optax.sgd(1e-3, momentum=0.9))
        state = start_from(jax.jit(tx.init)(params), params, weights())

        def step(params, state, x, tx=tx):
            grads = jax.grad(autocast(loss, policy=BF16))(as_float32(params), x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, BATCHES[0]).compile()
        # All that is held between steps takes its own place again, to the byte.
        held = jax.tree.leaves((params, state))
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in held)
        new = compiled(params, state, BATCHES[0])
        assert all(leaf.is_deleted() for leaf in held)
        assert jax.tree.structure(new) == jax.tree.structure((params, state))


def test_the_state_has_the_bytes_that_the_table_of_recipes_says():
    params = {"w": jnp.zeros((128, 128), jnp.bfloat16)}
    size = params["w"].size
    adam = optax.scale_by_adam()
    found = {
        name: round(sum(x.nbytes for x in jax.tree.leaves(jax.jit(tx.init)(params))) / size, 2)
        for name, tx in {
            "master": master_weights(adam),
            "kahan": kahan_summation(adam),
            "stochastic": stochastic_rounding(adam),
        }.items()
    }
    assert found == {"master": 12.0, "kahan": 10.0, "stochastic": 8.0}


BAD = {
    "no transformation": (lambda: master_weights(3), "master_weights wraps an optax"),
    "seed": (lambda: stochastic_rounding(optax.sgd(1.0), seed=0.5), "integer as its seed"),
    "state": (
        lambda: kahan_summation(optax.sgd(1.0)).update(jnp.ones(1), (), jnp.ones(1)),
        "must be a KahanState",
    ),
    "no parameters": (lambda: updated(None), "needs the parameters"),
    "float32": (lambda: updated(jnp.ones(1)), "another structure.*eqx.apply_updates made"),
    "other leaves": (lambda: updated([jnp.ones(1)] * 2), "another structure.*Call init with"),
    "no state": (lambda: float32_params((), jnp.ones(1)), "0 states in this tuple"),
    "wide": (
        lambda: start_from((), jnp.ones(1, jnp.bfloat16), jnp.ones(2)),
        r"float32 weights of shape \(1,\).*got float32\[2\]",
    ),
}


def updated(params):
    tx = master_weights(optax.sgd(1.0))
    return tx.update(jnp.ones(1), tx.init(jnp.ones(1, jnp.bfloat16)), params)


@pytest.mark.parametrize("name", BAD)
def test_wrong_use_says_what_to_do(name):
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    "part",
    {
        "multi_transform": lambda tx: optax.multi_transform(
            {"trained": tx, "frozen": optax.set_to_zero()},
            {"up": "trained", "scale": "frozen", "down": "trained"},
        ),
        "masked": lambda tx: optax.masked(tx, {"up": True, "scale": False, "down": True}),
    }.values(),
    ids=["multi_transform", "masked"],
)
def test_a_part_of_the_parameters_has_wide_weights(part, name):
    wide = {"up": jnp.linspace(-1, 1, 512), "scale": jnp.linspace(0, 1, 3), "down": jnp.ones(2) / 3}
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    tx = part(SCHEMES[name](optax.sgd(0.1)))
    state = start_from(tx.init(small), small, wide)
    found = float32_params(state, small)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
    exact = dict(wide, scale=as_float32(small["scale"]))
    limit = 2.0**-8 if name == "stochastic" else 2.0**-16
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=limit), found, exact)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, wide), state, small)
    assert jax.tree.structure(updates) == jax.tree.structure(small)


class Sharded(nnx.Module):
    """Parameters that are split along one axis or the other, and a bias."""

    def __init__(self):
        draw = lambda *shape: jnp.sin(jnp.arange(np.prod(shape)).reshape(shape)).astype("bfloat16")
        self.columns = nnx.Param(draw(48, 192), out_sharding=P(None, "d"))
        self.rows = nnx.Param(draw(48, 192), out_sharding=("d", None))
        self.bias = nnx.Param(jnp.ones(24), out_sharding=("d",))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("make", [kahan_summation, stochastic_rounding, master_weights])
def test_the_state_of_sharded_variables_divides(make, axis_type):
    def start():
        net = Sharded()
        return net, nnx.Optimizer(net, make(optax.adam(1e-2)), wrt=nnx.Param)

    here = jax.make_mesh((6,), ("d",), axis_types=(axis_type,), devices=jax.devices()[:6])
    with jax.set_mesh(here):
        _, optimizer = nnx.eval_shape(start)
    state = nnx.state(optimizer)
    shardings = nnx.get_named_sharding(state, here)
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        sharding.shard_shape(x.shape)  # or an error
