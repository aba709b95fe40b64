"""The environment of processes that tests start."""

import os


def environment_without_devices() -> dict[str, str]:
    """Returns this process's environment, but for how many CPU devices there are."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    flags = environment.get("XLA_FLAGS", "").split()
    environment["XLA_FLAGS"] = " ".join(f for f in flags if "device_count" not in f)
    return environment
