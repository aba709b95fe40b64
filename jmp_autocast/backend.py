"""Which device a program is for: in which dtypes it multiplies, and how XLA rounds there."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from .cpu_kernels import cpu_kernels
from .devices import DTYPES, Device, device_of_kind, generation_of

# XLA may leave out a rounding to 16 bits and back; XLA:CPU does so for a convolution's kernel.
EVERY_ROUNDING = {"xla_allow_excess_precision": False}
"""Options of a compiler that rounds wherever the program says so."""

_BFLOAT16, _FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(jnp.float16)


class Hardware(NamedTuple):
    """A device as JAX describes it.

    Args:
        platform: ``"cpu"``, ``"gpu"`` (``"cuda"``, ``"rocm"``), ``"tpu"`` or another.
        kind: Its name, for messages.
        capability: What JAX says of a GPU: ``"8.0"``, or ``"gfx90a"``; "" of anything else.
        given: The device with its rates, where a user named it; None of the device at hand.
    """

    platform: str
    kind: str
    capability: str = ""
    given: Device | None = None


# A user context is part of the key of JAX's caches: what is traced for another device is not found
# when the program runs here.
_SUPPOSED: Any = jax.make_user_context(None)


def supposing(device: Device) -> AbstractContextManager[Any]:
    """Returns the context in which programs are traced and planned for another device.

    Args:
        device: The device.
    """
    return _SUPPOSED(hardware_of(device))


def hardware_of(device: Device) -> Hardware:
    """Returns a device as JAX would describe it.

    Args:
        device: The device.
    """
    platform = {"nvidia": "gpu", "amd": "gpu"}.get(device.platform, device.platform)
    return Hardware(platform, device.name, device.capability, device)


def default_device() -> Hardware:
    """Returns the device that a program runs on where nobody chooses another."""
    if _SUPPOSED.value is not None:
        return _SUPPOSED.value
    device = jax.devices()[0]
    # JAX does not document the attribute, and devices other than GPUs lack it.
    capability = str(getattr(device, "compute_capability", ""))
    return Hardware(device.platform, device.device_kind, capability)


def device_of(hardware: Hardware) -> Device | None:
    """Returns the rates of a device, None where they are not known.

    Args:
        hardware: The device.

    Example:
        >>> device = device_of(Hardware("gpu", "NVIDIA H100 80GB HBM3", "9.0"))
        >>> device.name, round(device.bfloat16 / device.memory)
        ('H100 SXM', 295)
        >>> device_of(Hardware("cpu", "cpu")) is None
        True
    """
    if hardware.platform == "cpu":
        return None
    return hardware.given or device_of_kind(hardware.kind)


def _units(hardware: Hardware) -> tuple[str, ...] | None:
    """Returns what a device multiplies in matrix units, None where nothing is known of it."""
    generation = generation_of(*hardware[:3])
    if generation is not None:
        return generation.units
    if hardware.given is None:
        return None
    own, slow = hardware.given, hardware.given.float32 or 0
    return tuple(dtype for dtype in DTYPES if (own.rate(dtype) or 0) > slow)


def has_float8_units(hardware: Hardware) -> bool:
    """Returns whether a device is known to multiply in 8 bits.

    Example:
        >>> capabilities = "8.0", "8.9", "10.0", "gfx90a", "gfx942"
        >>> [has_float8_units(Hardware("gpu", "a GPU", c)) for c in capabilities]
        [False, True, True, False, True]
    """
    return "float8" in (_units(hardware) or ())


@dataclasses.dataclass(frozen=True)
class Choice:
    """A compute dtype, and why.

    Args:
        dtype: float16 or bfloat16, None where neither makes matmuls faster.
        reason: The reason, in words.
    """

    dtype: np.dtype | None
    reason: str


def choose_for(hardware: Hardware) -> Choice:
    """Returns what ``compute_dtype="auto"`` stands for on a device.

    Example:
        >>> choose_for(Hardware("gpu", "Tesla T4", "7.5"))
        Choice(dtype=dtype('float16'), reason='Tesla T4 has tensor cores for float16 alone')
    """
    kind, capability, units = hardware.kind, hardware.capability, _units(hardware)
    if hardware.platform == "cpu":
        kernels = cpu_kernels()
        return Choice(_BFLOAT16 if kernels.wide else None, kernels.reason)
    if units is None:
        return Choice(None, f"nothing is known of 16 bits on {kind} ({hardware.platform})")
    # As NVIDIA calls its own: only its GPUs have a number for a capability.
    what = "tensor cores" if capability[:1].isdigit() else "matrix units"
    if "bfloat16" in units:
        return Choice(_BFLOAT16, f"the {what} of {kind} multiply bfloat16")
    if "float16" in units:
        return Choice(_FLOAT16, f"{kind} has {what} for float16 alone")
    if what == "tensor cores":
        return Choice(None, f"{kind} has no tensor cores")
    of = f"{kind} ({capability})" if capability else kind
    return Choice(None, f"{of} has no matrix units for 16 bits")


def preferred_for(hardware: Hardware) -> Choice:
    """Returns what a policy without a compute dtype stands for on a device: 16 bits in any case.

    Example:
        >>> [str(preferred_for(Hardware("gpu", "a GPU", n)).dtype) for n in ("7.5", "8.0")]
        ['float16', 'bfloat16']
        >>> preferred_for(Hardware("cpu", "cpu")).reason
        'the default on a CPU'
    """
    # What a CPU has kernels for takes 0.1 s to find out, and would not change the answer.
    if hardware.platform == "cpu":
        return Choice(_BFLOAT16, "the default on a CPU")
    choice = choose_for(hardware)
    if choice.dtype is not None:
        return choice
    return Choice(_BFLOAT16, f"the default, although {choice.reason}")
