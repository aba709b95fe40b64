"""`explain_compiled` asks the TPU compiler, which is there where ``libtpu`` is, without a TPU.

    python -m tests.project.check_tpu

Not part of the suite: beside ``libtpu`` JAX looks for a TPU each time that it starts.
"""

import jax.numpy as jnp

from jmp_autocast import BF16, autocast, explain_compiled

if __name__ == "__main__":
    x = jnp.ones((64, 64))
    for fn, dtype in ((jnp.matmul, "float32"), (autocast(jnp.matmul, policy=BF16), "bfloat16")):
        report = explain_compiled(fn, x, x, device="v5e:2x2")
        assert (report.platform, report.share(dtype)) == ("tpu", 1.0), report
