"""Devices by name: what they multiply, how fast, and who says so. The numbers: devices.toml."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

from .policies.errors import did_you_mean, shown, wrong_type

DTYPES = ("bfloat16", "float16", "float8")
"""What matrix units multiply, as `Device` names it."""

_RATES = ("float32", "tf32", *DTYPES, "memory", "link")
_LEAST = 1e6
"""Rates below that are none: nothing that multiplies matrices is so slow."""
_PASSES = 6  # of bfloat16 in a float32 product of a TPU: XLA's BF16_BF16_F32_X6

# What people write before a name, and leave out.
_VENDORS = r"nvidia|geforce|tesla|amd|instinct|radeon|google|cloud|tpu|gpu|accelerator"


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that a program could run on, and what it does in a second at best.

    Those that are known go by their names: ``explain(fn, x, device="h100")``. This is for another
    one, ``explain(fn, x, device=Device(...))``. All rates are those of one device, as JAX counts
    them; None where there is none, or it is not known.

    Args:
        name: Its name.
        float32: FLOPs a second of matrix products that stay float32.
        tf32: Those of products in TF32.
        bfloat16: Those of products in bfloat16, without sparsity. Of a dtype without a rate nothing
            is expected: it is multiplied as fast as float32.
        float16: Those of products in float16.
        float8: Those of products in 8 bits.
        memory: Bytes a second to and from its memory.
        link: Bytes a second that it sends to other devices, over all its links in one direction.
        launch: Seconds that a kernel takes at least.
        multiplies: In what XLA multiplies float32 where nobody asks for a precision:
            ``"float32"``, ``"tf32"`` or ``"bfloat16"``.
        platform: ``"nvidia"``, ``"amd"``, ``"tpu"`` or ``"cpu"``; ``""`` of another.
        capability: What JAX says of a GPU: ``"8.0"``, or ``"gfx90a"``.
        source: Where the rates are from.
        date: When they were written down.

    Raises:
        TypeError: A rate is no number.
        ValueError: It is no rate of a device, such as 900 for 900e9, or ``multiplies`` is another
            word, or names a dtype without a rate.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain
        >>> from jmp_autocast.inspect import Device
        >>> mine = Device("mine", float32=20e12, bfloat16=160e12, memory=1e12)
        >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
        >>> report = explain(jnp.matmul, x, x, device=mine)
        >>> report.compute_dtype, report.roofline.speedup
        ('bfloat16', 8.0)
    """

    name: str
    _: dataclasses.KW_ONLY
    float32: float | None = None
    tf32: float | None = None
    bfloat16: float | None = None
    float16: float | None = None
    float8: float | None = None
    memory: float | None = None
    link: float | None = None
    launch: float = 2e-6
    multiplies: str = "float32"
    platform: str = ""
    capability: str = ""
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise wrong_type("Device takes a name", self.name, 'Write Device("mine", ...).')
        for field in (*_RATES, "launch"):
            _check_rate(field, getattr(self, field))
        if self.platform == "cpu":
            return
        fix = "float32= and memory= in FLOPs and bytes a second"
        if self.float32 is None or self.memory is None:
            raise ValueError(f"Device {self.name!r} needs {fix}, as Device(..., memory=900e9).")
        if self.multiplies not in ("float32", "tf32", "bfloat16") or self.default is None:
            raise ValueError(
                f"Device.multiplies must be 'float32', 'tf32' or 'bfloat16', and have a rate, got "
                f"{self.multiplies!r}. Give {self.multiplies}= as well, or leave multiplies out."
            )

    @property
    def default(self) -> float | None:
        """FLOPs a second of float32 products as XLA multiplies them by default.

        Example:
            >>> from jmp_autocast.inspect import Device
            >>> Device("mine", float32=20e12, memory=1e12).default
            20000000000000.0
        """
        return self.rate(self.multiplies)

    def rate(self, dtype: str) -> float | None:
        """Returns the FLOPs a second of products in a dtype, None where there is none.

        Args:
            dtype: The name of a field.

        Example:
            >>> from jmp_autocast.inspect import Device
            >>> Device("mine", float32=20e12, memory=1e12).rate("bfloat16") is None
            True
        """
        found: float | None = getattr(self, dtype)
        return found

    @property
    def low(self) -> str:
        """The 16-bit dtype that it multiplies faster than float32, bfloat16 first; else ``""``.

        Example:
            >>> from jmp_autocast.inspect import Device
            >>> Device("old", float32=8e12, float16=65e12, memory=3e11).low
            'float16'
        """
        slow = self.float32 or math.inf
        return next((x for x in ("bfloat16", "float16") if (self.rate(x) or 0) > slow), "")


def _check_rate(field: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(f"Device.{field} is a number", value, "Write 900e9 for 900 GB a second.")
    if field == "launch":
        if not 0 <= value < 1:
            raise ValueError(f"Device.launch is seconds, got {value!r}. Write 2e-6 for 2 us.")
    elif not _LEAST <= value < math.inf:
        raise ValueError(
            f"Device.{field} counts what a device does in a second, got {value!r}. Write 900e9 for "
            "900 GB, and 20e12 for 20 TFLOPs."
        )


class Generation(NamedTuple):
    """What devices of one make multiply in matrix units.

    Args:
        name: Its name.
        platform: Whose.
        units: The dtypes; ``"blocks"`` are MXFP8 and NVFP4.
        float32: As `Device.multiplies`.
        start: The compute capability from which on it holds, NVIDIA's alone.
        prefixes: How the capability of others begins, or the name of a TPU.
    """

    name: str
    platform: str
    units: tuple[str, ...]
    float32: str
    start: float
    prefixes: tuple[str, ...]


@functools.cache
def _table() -> Mapping[str, Any]:
    text = (resources.files(__package__ or "") / "devices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@functools.cache
def generations() -> tuple[Generation, ...]:
    """Returns the generations, of NVIDIA's the newest first."""
    found = [
        Generation(
            row["name"],
            row["platform"],
            tuple(row["units"]),
            row["float32"],
            row.get("from", 0.0),
            tuple(row.get("prefixes", ())),
        )
        for row in _table()["generation"]
    ]
    return tuple(sorted(found, key=lambda generation: -generation.start))


def generation_of(platform: str, kind: str, capability: str) -> Generation | None:
    """Returns the generation of a device, None where nothing is known of it.

    Args:
        platform: As JAX says, or `Device.platform`.
        kind: Its name.
        capability: As `Device.capability`.

    Example:
        >>> generation_of("gpu", "a GPU", "8.9").name, generation_of("tpu", "TPU7x", "").units
        ('Ada, Hopper', ('bfloat16', 'float8'))
    """
    whose, name = platform, capability
    if platform == "tpu":
        name = _plain(kind)
    elif capability.startswith("gfx"):
        whose = "amd"
    elif (number := _number(capability)) is not None:
        return next(g for g in generations() if g.platform == "nvidia" and number >= g.start)
    rows = (g for g in generations() if g.platform == whose and g.prefixes)
    return next((g for g in rows if name.startswith(g.prefixes)), None)


def _number(capability: str) -> float | None:
    try:
        return float(capability)
    except ValueError:
        return None


@functools.cache
def known_devices() -> tuple[Device, ...]:
    """Returns the devices of the table, in its order.

    Example:
        >>> len(known_devices()) > 14, known_devices()[0].name
        (True, 'GB200')
    """
    return tuple(_device(row) for row in _table()["device"])


def _device(row: Mapping[str, Any]) -> Device:
    platform, capability = row["platform"], row.get("capability", "")
    generation = generation_of(platform, row["name"], capability)
    assert generation is not None, row["name"]
    rates = {field: 1e12 * row[field] for field in _RATES if field in row}
    low = 1e12 * row["low"]
    rates |= {dtype: low for dtype in DTYPES[:2] if dtype in generation.units}
    return Device(
        row["name"],
        **{"float32": low / _PASSES, **rates},
        launch=1e-6 * _table()["launch"][platform],
        multiplies=generation.float32,
        platform=platform,
        capability=capability,
        source=row["source"],
        date=row["date"],
    )


def _plain(name: str) -> str:
    """Returns a name without what does not count: case, vendors, spaces and hyphens."""
    return re.sub(rf"{_VENDORS}|[^a-z0-9]", "", name.lower())


@functools.cache
def _names() -> Mapping[str, Device]:
    """From each name, as `_plain` returns it, to its device."""
    pairs = zip(_table()["device"], known_devices(), strict=True)
    return {_plain(each): device for row, device in pairs for each in _spelled(row)}


def _spelled(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["name"], *row["names"]


def device_of_kind(kind: str) -> Device | None:
    """Returns the device that JAX, or a person, calls by a name; None where it is not known.

    Args:
        kind: The name.

    Example:
        >>> device_of_kind("NVIDIA H100 80GB HBM3").name, device_of_kind("trillium").name
        ('H100 SXM', 'TPU v6e')
    """
    return _names().get(_plain(kind))


def as_device(value: Any) -> Device:
    """Returns the device that a user names.

    Args:
        value: A name, a `Device`, or a device of JAX.

    Raises:
        TypeError: It is none of these.
        ValueError: No device of that name is known.

    Example:
        >>> as_device("a100-40gb").name, as_device("cpu").name
        ('A100 40GB', 'CPU')
    """
    if isinstance(value, Device):
        return value
    # A device that JAX has: what it is called is all that is asked of it.
    name = getattr(value, "device_kind", value)
    if not isinstance(name, str):
        fix = 'Write device="h100", or a jmp_autocast.inspect.Device with its rates.'
        raise wrong_type("device is the name of a device", value, fix)
    if _plain(name) == "cpu":
        return CPU
    found = device_of_kind(name)
    if found is None:
        written = (each.lower() for row in _table()["device"] for each in _spelled(row))
        hint = did_you_mean(re.sub("[-_]", " ", name.lower()), ["cpu", *written], cutoff=0.6)
        known = ", ".join(device.name for device in known_devices())
        raise ValueError(
            f"device={shown(name)} must be a known device.{hint} Known are {known}, and cpu. For "
            "another one give its rates: jmp_autocast.inspect.Device(name, float32=20e12, "
            "bfloat16=160e12, memory=1e12)."
        )
    return found


CPU = Device("CPU", platform="cpu")
"""The CPU at hand. Which kernels it has is asked of it; a rate would have to be measured."""
