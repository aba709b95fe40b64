"""What tests need that start processes which talk to each other."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

_ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 120  # seconds; a run takes some ten


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


def run_workers(worker, processes, folder):
    """Runs a module of this folder in so many processes at once; returns what each of them saw."""
    environment = environment_without_devices()
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"}
    coordinator = f"127.0.0.1:{free_port()}"
    results = [folder / f"{i}-of-{processes}.npz" for i in range(processes)]
    children = []
    try:
        for i, result in enumerate(results):
            command = [sys.executable, "-m", f"tests.support.{worker}"]
            command += [str(i), str(processes), coordinator, result]
            children.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    cwd=_ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        said = [child.communicate(timeout=LIMIT)[0].decode() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
    assert [child.returncode for child in children] == [0] * processes, "\n".join(said)
    return [dict(np.load(result)) for result in results]
