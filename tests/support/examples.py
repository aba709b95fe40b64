"""Loading an example as a module, without leaving anything behind."""

import importlib.util
import pathlib
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look there
        patch.syspath_prepend(EXAMPLES)  # examples import each other
        spec.loader.exec_module(module)
    return module


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
