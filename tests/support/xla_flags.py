"""How XLA compiles the programs of the tests."""

import importlib.metadata
import os

QUICK = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")


def set_xla_flags(devices: int) -> None:
    """Sets the number of CPU devices, and that XLA compiles quickly.

    It takes a sixth of the time on JAX 0.10 and less on JAX 0.12, too: XLA's own passes are the
    same, LLVM optimizes less. It has to be called before JAX starts its backend. With
    ``XLA_FLAGS=--xla_backend_optimization_level=3`` programs are compiled as those of users are.

    Args:
        devices: How many CPU devices there shall be, for the sharding tests.
    """
    chosen = os.environ.get("XLA_FLAGS", "").split()
    # A small program split into parts for LLVM's threads takes longer in all.
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    if not any("xla_backend_optimization_level" in flag for flag in chosen):
        flags += QUICK
        # XLA ends a process that sets what it does not know, as this is from JAX 0.12 on. In jaxlib
        # 0.10.0 it rounds to float8 by way of float16, twice.
        jaxlib = importlib.metadata.version("jaxlib")
        if jaxlib.startswith("0.10.") and jaxlib != "0.10.0":
            flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*flags, *chosen])
