"""The settings under which the compilers of devices that are not there are asked."""

from __future__ import annotations

import os

import jax

from jmp_autocast.inspect.compiled.targets import (
    GPUS as GPUS,
    TARGETS as TARGETS,
    TPUS as TPUS,
    NotInstalled as NotInstalled,
    check_installed as check_installed,
    devices as devices,
)


def prepare_environment() -> None:
    """Sets what the compilers read from the environment; before JAX starts a backend."""
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    # Without a GPU no kernel can be timed; level 0 takes the default of each.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
