"""What is known of devices: in which dtypes their matrix units multiply.

The tables are those of the vendors: NVIDIA's CUDA C++ Programming Guide, section "Compute
Capabilities", and AMD's ROCm page on data types and precision.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_BFLOAT16, _FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(jnp.float16)
# AMD's architectures from MI100 on multiply both 16-bit types in matrix units.
_AMD_BFLOAT16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_AMD_FLOAT8 = ("gfx94", "gfx95", "gfx12")


class Device(NamedTuple):
    """A kind of device.

    Args:
        platform: ``"cpu"``, ``"gpu"`` (``"cuda"``, ``"rocm"``), ``"tpu"`` or another.
        kind: Its name, for messages.
        capability: What JAX says of a GPU: ``"8.0"``, or ``"gfx90a"``; "" of anything else.
    """

    platform: str
    kind: str
    capability: str = ""


def default_device() -> Device:
    """Returns the device that a program runs on where nobody chooses another."""
    device = jax.devices()[0]
    # JAX does not document the attribute, and devices other than GPUs lack it.
    capability = str(getattr(device, "compute_capability", ""))
    return Device(device.platform, device.device_kind, capability)


def has_float8_units(device: Device) -> bool:
    """Returns whether a device is known to multiply in 8 bits.

    Of GPUs these are NVIDIA's from compute capability 8.9 and AMD's from gfx94 on, of TPUs the
    seventh generation.

    Example:
        >>> capabilities = "8.0", "8.9", "10.0", "gfx90a", "gfx942"
        >>> [has_float8_units(Device("gpu", "a GPU", c)) for c in capabilities]
        [False, True, True, False, True]
    """
    if device.platform == "tpu":
        return "7" in device.kind
    return device.capability.startswith(_AMD_FLOAT8) or (_number(device) or 0) >= 8.9


@dataclasses.dataclass(frozen=True)
class Choice:
    """A compute dtype, and why.

    Args:
        dtype: float16 or bfloat16, None where neither makes matmuls faster.
        reason: The reason, in words.
    """

    dtype: np.dtype | None
    reason: str


def choose_for(device: Device) -> Choice:
    """Returns what ``compute_dtype="auto"`` stands for on a device.

    Example:
        >>> choose_for(Device("gpu", "Tesla T4", "7.5"))
        Choice(dtype=dtype('float16'), reason='Tesla T4 has tensor cores for float16 alone')
    """
    kind = device.kind
    if device.platform == "tpu":
        return Choice(_BFLOAT16, f"the matrix units of {kind} multiply bfloat16")
    if device.platform == "cpu":
        return Choice(None, "XLA computes 16-bit matmuls in float32 on most CPUs")
    if device.capability.startswith("gfx"):
        if device.capability.startswith(_AMD_BFLOAT16):
            return Choice(_BFLOAT16, f"the matrix units of {kind} multiply bfloat16")
        return Choice(None, f"{kind} ({device.capability}) has no matrix units for 16 bits")
    number = _number(device)
    if number is None:
        return Choice(None, f"nothing is known of 16 bits on {kind} ({device.platform})")
    if number >= 8:
        return Choice(_BFLOAT16, f"the tensor cores of {kind} multiply bfloat16")
    if number >= 7:
        return Choice(_FLOAT16, f"{kind} has tensor cores for float16 alone")
    return Choice(None, f"{kind} has no tensor cores")


def _number(device: Device) -> float | None:
    """Returns the compute capability of an NVIDIA GPU, None for any other device."""
    try:
        return float(device.capability)
    except ValueError:
        return None
