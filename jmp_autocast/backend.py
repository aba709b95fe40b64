"""``compute_dtype="auto"``: the dtype in which the default backend's matrix units multiply."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

_BFLOAT16, _FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(jnp.float16)
# AMD's architectures from MI100 on multiply both 16-bit types in matrix units.
_AMD_BFLOAT16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A compute dtype, and why.

    Args:
        dtype: float16 or bfloat16, None where neither makes matmuls faster.
        reason: The reason, in words.
    """

    dtype: np.dtype | None
    reason: str


def choose() -> Choice:
    """Returns the choice for the first device of the default backend."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    return choose_for(device.platform, device.device_kind, capability)


def choose_for(platform: str, kind: str, capability: str) -> Choice:
    """Returns the choice for a kind of device.

    The tables are those of the vendors: NVIDIA's CUDA C++ Programming Guide, section "Compute
    Capabilities", and AMD's ROCm page on data types and precision.

    Args:
        platform: ``"cpu"``, ``"gpu"`` (``"cuda"``, ``"rocm"``), ``"tpu"`` or another.
        kind: The device's name, for the reason.
        capability: What JAX says of a GPU: ``"8.0"``, or ``"gfx90a"``.

    Example:
        >>> choose_for("gpu", "Tesla T4", "7.5")
        Choice(dtype=dtype('float16'), reason='Tesla T4 has tensor cores for float16 alone')
    """
    if platform == "tpu":
        return Choice(_BFLOAT16, f"the matrix units of {kind} multiply bfloat16")
    if platform == "cpu":
        return Choice(None, "XLA computes 16-bit matmuls in float32 on most CPUs")
    if capability.startswith("gfx"):
        if capability.startswith(_AMD_BFLOAT16):
            return Choice(_BFLOAT16, f"the matrix units of {kind} multiply bfloat16")
        return Choice(None, f"{kind} ({capability}) has no matrix units for 16 bits")
    number = _number(capability)
    if number is None:
        return Choice(None, f"nothing is known of 16 bits on {kind} ({platform})")
    if number >= 8:
        return Choice(_BFLOAT16, f"the tensor cores of {kind} multiply bfloat16")
    if number >= 7:
        return Choice(_FLOAT16, f"{kind} has tensor cores for float16 alone")
    return Choice(None, f"{kind} has no tensor cores")


def _number(capability: str) -> float | None:
    try:
        return float(capability)
    except ValueError:
        return None
