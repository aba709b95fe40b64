"""Which bfloat16 matmuls XLA:CPU hands to a kernel that is faster than float32: asked, not listed.

What XLA does with a 16-bit matmul on a CPU changes with its versions and flags: JAX 0.10 has fast
kernels for float32 results, 0.12 for both, and a flag turns them off. So one small program is
compiled (0.1 s, once per process, and never at import) and read. Whether the kernels are fast the
program does not say: they also exist for CPUs that widen each number. That the CPU says itself,
and ``XLA_FLAGS=--xla_cpu_max_isa=AVX2`` has one with units do what one without does.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# What multiplies bfloat16, as Linux names it: Intel's and AMD's CPUs, and Arm's.
UNITS = ("amx_bf16", "avx512_bf16", "bf16")
# Values of `xla_cpu_max_isa` that leave these units out.
_OLDER = ("SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_VNNI")
_CPUINFO = pathlib.Path("/proc/cpuinfo")


class CPUKernels(NamedTuple):
    """What a CPU multiplies fast in bfloat16.

    Args:
        wide: Whether a product with a float32 result runs in a fast kernel.
        rounded: Whether one with a bfloat16 result does.
        reason: Why, in words.
    """

    wide: bool
    rounded: bool
    reason: str


def cpu_kernels() -> CPUKernels:
    """Returns what the CPU at hand multiplies fast, found out once per process.

    Example:
        >>> kernels = cpu_kernels()
        >>> kernels.rounded <= kernels.wide
        True
    """
    return _kernels_with(cpu_features())


def cpu_features() -> frozenset[str]:
    """Returns the features of the CPU as Linux names them; none on other systems.

    A value of ``xla_cpu_max_isa`` that is older than the bfloat16 units leaves those out.
    """
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = (line for line in lines if line.startswith(("flags", "Features")))
    features = frozenset(next(flags, "").partition(":")[2].split())
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    return features.difference(UNITS) if limits and limits[-1].upper() in _OLDER else features


@functools.lru_cache(maxsize=8)
def _kernels_with(features: frozenset[str]) -> CPUKernels:
    unit = next((u for u in UNITS if u in features), None)
    if unit is None:
        return CPUKernels(False, False, f"this CPU has none of {', '.join(UNITS)}")
    wide, rounded = _has_kernel(jnp.float32), _has_kernel(jnp.bfloat16)
    if not wide:
        return CPUKernels(False, False, f"XLA has no kernel for bfloat16 on this CPU ({unit})")
    return CPUKernels(wide, rounded, f"XLA multiplies bfloat16 by {unit} on this CPU")


def _has_kernel(dtype: Any) -> bool:
    """Returns whether a compiled product reads bfloat16 in a library's kernel."""
    operand = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=dtype))
    # The probe is asked while another program is lowered, perhaps for a mesh.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        text = product.lower(operand, operand).compile().as_text() or ""
    # Without a kernel XLA converts the operands to float32, or leaves a naked `dot`.
    return ("__ynn_fusion" in text or "__onednn$matmul" in text) and " convert(" not in text
