"""Which public name stands on which page of the reference.

A page takes its names from the ``__all__`` of a sub-package, so that a new public name is on it by
itself. Names of ``jmp_autocast.__all__`` that no sub-package claims are on the first page.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import jmp_autocast
import jmp_autocast.integrations

_CLAIMS = {"policies": "policies", "loss_scaling": "loss_scaling", "inspection": "inspect"}


def integrations() -> list[str]:
    """Returns the public modules of `jmp_autocast.integrations`: those with an ``__all__``."""
    package = jmp_autocast.integrations
    names = [f"{package.__name__}.{m.name}" for m in pkgutil.iter_modules(package.__path__)]
    return [name for name in names if hasattr(importlib.import_module(name), "__all__")]


def groups() -> dict[str, list[str]]:
    """Returns the dotted names of each page of the reference, in alphabetical order."""
    exported = set(jmp_autocast.__all__)
    pages: dict[str, list[str]] = {"autocast": []}
    for page, package in _CLAIMS.items():
        module = importlib.import_module(f"jmp_autocast.{package}")
        names = set(module.__all__)
        if page == "policies":  # its other names are for the rooms of the package
            names &= exported
        at_top = names & exported
        pages[page] = sorted(f"jmp_autocast.{name}" for name in at_top)
        pages[page] += sorted(f"{module.__name__}.{name}" for name in names - at_top)
        exported -= at_top
    pages["autocast"] = sorted(f"jmp_autocast.{name}" for name in exported)
    pages["integrations"] = [
        f"{module}.{name}"
        for module in integrations()
        for name in sorted(importlib.import_module(module).__all__)
    ]
    return pages


def resolve(dotted: str) -> object:
    """Returns the object of a dotted name."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public_names() -> Iterator[str]:
    """Yields every dotted name of the reference."""
    for names in groups().values():
        yield from names
