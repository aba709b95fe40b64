"""The program that each process of loss_scaling/test_sharded.py runs; it is no test itself.

    python -m tests.support.loss_scale_worker PROCESS PROCESSES COORDINATOR RESULT

It trains on four CPU devices, shared evenly by the processes, and saves what it sees to RESULT.
"""

import sys

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from jmp_autocast import dynamic_loss_scaling, scaled_value_and_grad, skipped_steps
from jmp_autocast.loss_scaling import loss_scale

DEVICES, STEPS, BAD_STEP = 4, 6, 3
# Quarters, so that sums are exact and do not depend on who adds them in which order.
BATCHES = np.random.default_rng(0).integers(-8, 9, (STEPS, 8, 3)).astype(np.float32) / 4
WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def batch(step):
    """Rows 4 to 7 belong to the last two devices, so to process 1 of 2."""
    x = BATCHES[step].copy()
    if step == BAD_STEP:
        x[6, 1] = np.inf
    return x


def optimizer(axis_name=None):
    return dynamic_loss_scaling(
        optax.adam(0.05), init_scale=256.0, growth_interval=2, axis_name=axis_name
    )


def loss(weights, x):
    return (x * weights.sum(axis=0)).sum()


def train(mesh, step, weight_spec, tx):
    """Runs all steps; returns weights, inner state and scale after each, whole."""
    put = lambda x, spec: jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, spec), lambda index: np.asarray(x)[index]
    )
    specs = optax.tree_map_params(
        tx,
        lambda _, spec: spec,
        tx.init(WEIGHTS),
        weight_spec,
        transform_non_params=lambda _: P(),
    )
    weights, state = put(WEIGHTS, weight_spec), jax.tree.map(put, tx.init(WEIGHTS), specs)
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
    step = jax.jit(step(specs))
    found = []
    for i in range(STEPS):
        weights, state = step(weights, state, put(batch(i), P("data")))
        seen = (weights, state.inner_state, loss_scale(state), skipped_steps(state))
        found.append(
            [np.asarray(leaf.addressable_data(0)) for leaf in map(whole, jax.tree.leaves(seen))]
        )
    return [np.stack(leaf) for leaf in zip(*found, strict=True)]


def update(tx, weights, state, grads):
    updates, state = tx.update(grads, state, weights)
    return optax.apply_updates(weights, updates), state


def data_parallel(mesh):
    """Under ``jit``: whole weights everywhere."""
    tx = optimizer()

    def step(weights, state, x):
        _, grads = scaled_value_and_grad(loss)(state, weights, x)
        return update(tx, weights, state, grads)

    return train(mesh, lambda _: step, P(), tx)


def sliced(mesh):
    """Under ``shard_map``: each device updates one row from its own data, nothing is summed."""
    tx = optimizer("data")

    def step(weights, state, x):
        _, grads = scaled_value_and_grad(loss)(state, weights, x)
        return update(tx, weights, state, grads)

    def mapped(state_specs):
        specs = (P("data"), state_specs)
        # Unchecked, so that shards which disagree would show in the values.
        return jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs, check_vma=False
        )

    return train(mesh, mapped, P("data"), tx)


def seen():
    """What a process sees after each step, by the way to run them and the place in a step."""
    mesh = jax.make_mesh((DEVICES,), ("data",))
    found = {"jit": data_parallel(mesh), "shard_map": sliced(mesh)}
    return {f"{name}.{i}": x for name, leaves in found.items() for i, x in enumerate(leaves)}


def start(process, processes, coordinator):
    """Joins the other processes."""
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        coordinator_bind_address=coordinator,
        initialization_timeout=60,
    )
    assert (jax.process_count(), jax.device_count()) == (processes, DEVICES)


def main(process, processes, coordinator, result):
    start(process, processes, coordinator)
    np.savez(result, **seen())
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
