"""Fills the tables of docs/guides/hardware.md from the package's table of devices.

    python docs/tools/generate_devices.py           # writes the page
    python docs/tools/generate_devices.py --check   # exits with 1 if the page is out of date

What stands between ``<!-- NAME -->`` and ``<!-- end -->`` is written here; the rest by hand.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from jmp_autocast.devices import (
    Device,
    Generation,
    generation_of,
    generations,
    known_devices,
)

PAGE = pathlib.Path(__file__).parents[1] / "guides" / "hardware.md"
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # where a test imports this file

from pages import filled, run  # noqa: E402

_RATES = ("float32", "tf32", "float8")


def devices() -> str:
    """Returns the table of devices: a row each."""
    lines = [
        "| device | 16 bits in | float32 | TF32 | 16 bits | float8 | memory | link | from |",
        "|---" * 9 + "|",
    ]
    for device in known_devices():
        float32, tf32, eight = (_tera(device.rate(name)) for name in _RATES)
        rates = [float32, tf32, _tera(device.rate(device.low)), eight]
        # A long number would wrap: GB a second are whole.
        nbytes = [_giga(device.memory), _giga(device.link)]
        source = f"[{device.date}]({device.source})"
        lines.append("| " + " | ".join([device.name, device.low, *rates, *nbytes, source]) + " |")
    return "\n".join(lines)


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:.4g}"


def _giga(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.0f}"


def units() -> str:
    """Returns the table of generations: what each multiplies in matrix units."""
    lines = [
        "| generation | how it is known | matrix units multiply | float32 by default in | known |",
        "|---" * 5 + "|",
    ]
    rows = sorted(generations(), key=lambda g: (g.platform != "nvidia", g.start))
    for g in rows:
        known = ", ".join(device.name for device in known_devices() if _generation(device) == g)
        how = f"compute capability from {g.start:.1f} on" if g.platform == "nvidia" else ""
        how = how or ", ".join(f"`{prefix}`" for prefix in g.prefixes if prefix) or "any other"
        multiply = ", ".join(g.units) or "none"
        lines.append(f"| {g.name} | {how} | {multiply} | {g.float32} | {known or '-'} |")
    return "\n".join(lines)


def _generation(device: Device) -> Generation | None:
    return generation_of(device.platform, device.name, device.capability)


def main(arguments: Sequence[str] | None = None, page: pathlib.Path = PAGE) -> int:
    """Writes or checks the page; returns the exit status."""
    sections = {"units": units, "devices": devices}
    return run(lambda: filled(PAGE, sections), page, "generate_devices.py", arguments)


if __name__ == "__main__":
    sys.exit(main())
