"""What tests need that start processes which talk to each other."""

import os
import socket


def free_port() -> int:
    """Returns a port of the loopback interface that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment_without_devices() -> dict[str, str]:
    """Returns this process's environment, but for how many CPU devices there are."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    flags = environment.get("XLA_FLAGS", "").split()
    environment["XLA_FLAGS"] = " ".join(f for f in flags if "device_count" not in f)
    return environment
