"""The dtypes of a device's matrix units, and compiler options that keep every rounding."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

# By default XLA may remove a cast to 16 bits together with the cast back to float32, and XLA:CPU
# does so at a convolution.
EVERY_ROUNDING = {"xla_allow_excess_precision": False}
"""Compiler options with which XLA removes no rounding of the program."""

_BFLOAT16, _FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(jnp.float16)


# The dtypes that matrix units multiply. A row of `_NVIDIA` applies to GPUs of at least its compute
# capability, and the newest row comes first. A row of `_AMD` or `_TPU` applies if one of its
# prefixes starts the GPU's capability or the TPU's name.
_NVIDIA: tuple[tuple[float, tuple[str, ...]], ...] = (
    (8.9, ("bfloat16", "float16", "float8")),  # Ada, Hopper, Blackwell
    (8.0, ("bfloat16", "float16")),  # Ampere
    (7.0, ("float16",)),  # V100, T4
    (0.0, ()),
)
_AMD: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("gfx908", "gfx90a", "gfx11"), ("bfloat16", "float16")),  # CDNA 1 and 2, RDNA 3
    (("gfx94", "gfx95", "gfx12"), ("bfloat16", "float16", "float8")),  # CDNA 3 and 4, RDNA 4
    (("gfx",), ()),
)
_TPU: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("7", "v7", "ironwood"), ("bfloat16", "float8")),
    (("",), ("bfloat16",)),
)


class Hardware(NamedTuple):
    """A device as JAX describes it.

    Args:
        platform: ``"cpu"``, ``"gpu"`` (``"cuda"``, ``"rocm"``), ``"tpu"`` or another.
        kind: The name of the device, for messages.
        capability: JAX's name of a GPU's capability: ``"8.0"``, or ``"gfx90a"``; "" for none.
    """

    platform: str
    kind: str
    capability: str = ""


def default_device() -> Hardware:
    """Returns the default device of JAX."""
    device = jax.devices()[0]
    # `compute_capability` may be missing: JAX does not document it, and only GPUs have it.
    capability = str(getattr(device, "compute_capability", ""))
    return Hardware(device.platform, device.device_kind, capability)


def _units(hardware: Hardware) -> tuple[str, ...] | None:
    """Returns the dtypes that the matrix units multiply, None for an unknown device."""
    platform, kind, capability = hardware
    if platform == "tpu":
        name, rows = re.sub(r"google|cloud|tpu|[^a-z0-9]", "", kind.lower()), _TPU
    elif re.fullmatch(r"\d+(\.\d+)?", capability):
        return next(units for start, units in _NVIDIA if float(capability) >= start)
    else:
        name, rows = capability, _AMD
    return next((units for prefixes, units in rows if name.startswith(prefixes)), None)


def has_float8_units(hardware: Hardware) -> bool:
    """Returns whether a device is known to multiply in 8 bits.

    Example:
        >>> capabilities = "8.0", "8.9", "10.0", "gfx90a", "gfx942"
        >>> [has_float8_units(Hardware("gpu", "a GPU", c)) for c in capabilities]
        [False, True, True, False, True]
    """
    return "float8" in (_units(hardware) or ())


class Choice(NamedTuple):
    """A compute dtype, float16 or bfloat16, and the reason for it, in words."""

    dtype: np.dtype
    reason: str


def preferred_for(hardware: Hardware) -> Choice:
    """Returns the default compute dtype of a device: that of its matrix units, or bfloat16.

    Example:
        >>> [str(preferred_for(Hardware("gpu", "a GPU", n)).dtype) for n in ("7.5", "8.0")]
        ['float16', 'bfloat16']
        >>> preferred_for(Hardware("gpu", "Tesla T4", "7.5")).reason
        'Tesla T4 has tensor cores for float16 alone'
    """
    kind, capability, units = hardware.kind, hardware.capability, _units(hardware)
    # A CPU's kernels are not looked up: this would take 0.1 s and not change the result.
    if hardware.platform == "cpu":
        return Choice(_BFLOAT16, "the default on a CPU")
    # The message says "tensor cores", NVIDIA's term, for NVIDIA's GPUs: only their capability is
    # a number.
    what = "tensor cores" if capability[:1].isdigit() else "matrix units"
    if units is None:
        reason = f"nothing is known of 16 bits on {kind} ({hardware.platform})"
    elif "bfloat16" in units:
        return Choice(_BFLOAT16, f"the {what} of {kind} multiply bfloat16")
    elif "float16" in units:
        return Choice(_FLOAT16, f"{kind} has {what} for float16 alone")
    elif what == "tensor cores":
        reason = f"{kind} has no tensor cores"
    else:
        of = f"{kind} ({capability})" if capability else kind
        reason = f"{of} has no matrix units for 16 bits"
    return Choice(_BFLOAT16, f"the default, although {reason}")
