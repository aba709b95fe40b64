"""Which public name stands on which page of the reference.

A page takes its names from the ``__all__`` of a sub-package, so that a new public name is on it by
itself. Names of ``jmp_autocast.__all__`` that no sub-package claims are on the first page.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import pkgutil
import re
import types
from collections.abc import Iterator

import jmp_autocast
import jmp_autocast.integrations

_CLAIMS = {
    "policies": "policies",
    "quantized": "quantize_params",
    "loss_scaling": "loss_scaling",
    "optimizers": "optimizers",
    "inspection": "inspect",
}


def integrations() -> dict[str, list[str]]:
    """Returns the public names of each module of `jmp_autocast.integrations`.

    A module that another one imports is a part of that one, and is left out.
    """
    package = jmp_autocast.integrations
    modules = [m.name for m in pkgutil.iter_modules(package.__path__)]
    folder = pathlib.Path(*package.__path__)
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in modules}
    parts = {name for text in sources.values() for name in re.findall(r"from \.(\w+) import", text)}
    found = {name: f"{package.__name__}.{name}" for name in modules if name not in parts}
    return {name: _public(importlib.import_module(name)) for name in found.values()}


def _public(module: types.ModuleType) -> list[str]:
    """The ``__all__`` of a module; without one, the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    )


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
        f"{module}.{name}" for module, names in integrations().items() for name in names
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
