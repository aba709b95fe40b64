"""`explain_compiled` reads what the TPU compiler made, which needs ``libtpu`` and no TPU.

    python -m tests.project.check_tpu

Not part of the suite: beside ``libtpu`` JAX looks for a TPU each time that it starts.
"""

import os

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jmp_autocast import BF16, autocast, explain_compiled


def stacked(length):
    return lambda x, w: jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=length)[0]


if __name__ == "__main__":
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")
    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=SingleDeviceSharding(chip))
    report = explain_compiled(autocast(jnp.matmul, policy=BF16), x, x, against=jnp.matmul)
    for found, dtype in ((report, "bfloat16"), (report.against, "float32")):
        assert (found.platform, found.share(dtype)) == ("tpu", 1.0), found
        assert found.cycles_by_kind()["product"] > 0, found
    cycles = [explain_compiled(stacked(length), x, x).cycles for length in (10, 20, 30)]
    assert cycles[2] - cycles[1] == cycles[1] - cycles[0] > 0, cycles
