"""Which bfloat16 matmuls XLA:CPU runs in a kernel that is faster than float32.

The kernels depend on the version and the flags of XLA: JAX 0.10 has fast kernels for float32
results alone, JAX 0.12 for float32 and bfloat16 results, and a flag turns them off. So two small
programs are compiled (0.1 s, once per process, and never at import), and their text is searched for
kernels. XLA also has slow bfloat16 kernels for CPUs without bfloat16 units, so the features of the
CPU are read first. With ``XLA_FLAGS=--xla_cpu_max_isa=AVX2`` a CPU with these units counts as one
without.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Linux's names of the CPU features that multiply bfloat16: two of Intel and AMD, and one of Arm.
UNITS = ("amx_bf16", "avx512_bf16", "bf16")
# With these values of `xla_cpu_max_isa`, XLA does not use the bfloat16 features of the CPU.
_OLDER = ("SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_VNNI")
_CPUINFO = pathlib.Path("/proc/cpuinfo")


class CPUKernels(NamedTuple):
    """The bfloat16 products that are fast on a CPU.

    Args:
        wide: Whether a product with a float32 result runs in a fast kernel.
        rounded: Whether a product with a bfloat16 result runs in a fast kernel.
        reason: The reason, for messages.
    """

    wide: bool
    rounded: bool
    reason: str


def cpu_kernels() -> CPUKernels:
    """Returns which bfloat16 products are fast on this CPU; the answer is cached for the process.

    Example:
        >>> kernels = cpu_kernels()
        >>> kernels.rounded <= kernels.wide
        True
    """
    return _kernels_with(cpu_features())


def cpu_features() -> frozenset[str]:
    """Returns the features of the CPU as Linux names them; none on other systems.

    If ``xla_cpu_max_isa`` names an instruction set without bfloat16 units, the units are left out.
    """
    features = _features_in(_CPUINFO)
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    return features.difference(UNITS) if limits and limits[-1].upper() in _OLDER else features


@functools.lru_cache(maxsize=8)
def _features_in(file: pathlib.Path) -> frozenset[str]:
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(flags, "").partition(":")[2].split())


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
    """Returns whether XLA:CPU has a kernel for bfloat16 operands and this result dtype."""
    operand = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=dtype))
    # JAX may be lowering another program here, perhaps for a mesh, so the small program names its
    # own device.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        text = product.lower(operand, operand).compile().as_text() or ""
    # Without a kernel, XLA converts the operands to float32 or leaves a plain `dot`.
    return ("__ynn_fusion" in text or "__onednn$matmul" in text) and " convert(" not in text
