"""The program that each process of test_arrays_over_processes.py runs; it is no test itself.

    python -m tests.support.closed_over_worker PROCESS PROCESSES COORDINATOR RESULT

It calls a function in mixed precision that closes over arrays which no process holds as a whole.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jmp_autocast import BF16, autocast

DEVICES = 4
WEIGHT, BIAS = (np.random.default_rng(i).standard_normal((8, 8), np.float32) for i in range(2))
INPUT = np.eye(8, dtype=np.float32)


def product():
    """Of arrays that are split over all devices, whole."""
    mesh = jax.make_mesh((DEVICES,), ("data",))
    put = lambda x: jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, P("data")), lambda index: x[index]
    )
    weight, bias, x = map(put, (WEIGHT, BIAS, INPUT))
    assert bias.is_fully_addressable == (jax.process_count() == 1)
    fn = autocast(lambda x: x @ weight * bias, policy=BF16, output_dtype="computed")
    out = fn(x)
    assert out.dtype == jnp.bfloat16, out.dtype
    whole = jax.jit(lambda x: x.astype(jnp.float32), out_shardings=NamedSharding(mesh, P()))
    return np.asarray(whole(out).addressable_data(0))


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
    np.savez(result, out=product())
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
