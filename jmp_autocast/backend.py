"""What is known of devices: in which dtypes their matrix units multiply, and how XLA rounds.

The tables are those of the vendors: NVIDIA's CUDA C++ Programming Guide, section "Compute
Capabilities", and AMD's ROCm page on data types and precision.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .cpu_kernels import cpu_kernels

# XLA may leave out a rounding to 16 bits and back; XLA:CPU does so for a convolution's kernel.
EVERY_ROUNDING = {"xla_allow_excess_precision": False}
"""Options of a compiler that rounds wherever the program says so."""

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


def has_microscaling_units(device: Device) -> bool:
    """Returns whether a device is known to multiply in MXFP8: NVIDIA's GPUs from B200 on.

    Example:
        >>> [has_microscaling_units(Device("gpu", "a GPU", c)) for c in ("9.0", "10.0", "gfx950")]
        [False, True, False]
    """
    return (_number(device) or 0) >= 10


class Rates(NamedTuple):
    """What a device does in a second, at best.

    Args:
        low: Floating point operations of 16-bit products, without sparsity.
        full: Those of float32 products as XLA multiplies them by default: in TF32 on NVIDIA's GPUs
            from compute capability 8.0 on, in bfloat16 on TPUs.
        nbytes: Bytes to and from its memory.
        source: Where the numbers are from.
    """

    low: float
    full: float
    nbytes: float
    source: str


_NVIDIA, _CLOUD = "NVIDIA's datasheet of the {}", "Google Cloud's page on the {}"

# By what a device's name holds, the first that fits. 10**12 operations and bytes a second.
_RATES: tuple[tuple[str, float, float, float, str], ...] = (
    ("H200", 989.4, 494.7, 4.8, _NVIDIA.format("H200 SXM")),
    ("H100 80GB HBM3", 989.4, 494.7, 3.35, _NVIDIA.format("H100 SXM")),
    ("H100 PCIe", 756.0, 378.0, 2.0, _NVIDIA.format("H100 PCIe")),
    ("A100-SXM4-80GB", 312.0, 156.0, 2.039, _NVIDIA.format("A100 80GB SXM")),
    ("A100 80GB PCIe", 312.0, 156.0, 1.935, _NVIDIA.format("A100 80GB PCIe")),
    ("A100-SXM4-40GB", 312.0, 156.0, 1.555, _NVIDIA.format("A100 40GB")),
    ("A100-PCIE-40GB", 312.0, 156.0, 1.555, _NVIDIA.format("A100 40GB")),
    ("NVIDIA L4", 121.0, 60.0, 0.3, _NVIDIA.format("L4")),
    ("Tesla V100-SXM2", 125.0, 15.7, 0.9, _NVIDIA.format("V100 SXM2")),
    ("Tesla T4", 65.0, 8.1, 0.32, _NVIDIA.format("T4")),
    ("TPU v6 lite", 918.0, 918.0, 1.64, _CLOUD.format("TPU v6e")),
    ("TPU v5 lite", 197.0, 197.0, 0.819, _CLOUD.format("TPU v5e")),
    ("TPU v5", 459.0, 459.0, 2.765, _CLOUD.format("TPU v5p")),
    ("TPU v4", 275.0, 275.0, 1.228, _CLOUD.format("TPU v4")),
)


def rates_of(device: Device) -> Rates | None:
    """Returns the rates of a device, None where they are not known.

    Example:
        >>> rates = rates_of(Device("gpu", "NVIDIA H100 80GB HBM3", "9.0"))
        >>> rates.source, round(rates.low / rates.nbytes)
        ("NVIDIA's datasheet of the H100 SXM", 295)
        >>> rates_of(Device("cpu", "cpu")) is None
        True
    """
    for name, low, full, nbytes, source in _RATES:
        if name in device.kind:
            return Rates(1e12 * low, 1e12 * full, 1e12 * nbytes, source)
    return None


def rates_named(name: str) -> Rates | None:
    """Returns the rates of the first device whose name holds a text, None where there is none.

    Example:
        >>> rates = rates_named("h100")
        >>> rates and rates.source
        "NVIDIA's datasheet of the H100 SXM"
    """
    kinds = [kind for kind, *_ in _RATES if name.casefold() in kind.casefold()]
    return rates_of(Device("", kinds[0])) if kinds else None


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
        kernels = cpu_kernels()
        return Choice(_BFLOAT16 if kernels.wide else None, kernels.reason)
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


def preferred_for(device: Device) -> Choice:
    """Returns what a policy without a compute dtype stands for on a device: 16 bits in any case.

    Example:
        >>> [str(preferred_for(Device("gpu", "a GPU", n)).dtype) for n in ("7.5", "8.0")]
        ['float16', 'bfloat16']
        >>> preferred_for(Device("cpu", "cpu")).reason
        'the default on a CPU'
    """
    # What a CPU has kernels for takes 0.1 s to find out, and would not change the answer.
    if device.platform == "cpu":
        return Choice(_BFLOAT16, "the default on a CPU")
    choice = choose_for(device)
    if choice.dtype is not None:
        return choice
    return Choice(_BFLOAT16, f"the default, although {choice.reason}")


def _number(device: Device) -> float | None:
    """Returns the compute capability of an NVIDIA GPU, None for any other device."""
    try:
        return float(device.capability)
    except ValueError:
        return None
