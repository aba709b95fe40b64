"""Scripts and packages that are run from their folder: benchmarks and examples."""

import contextlib
import importlib
import sys

import pytest

from .markdown_pages import ROOT


@contextlib.contextmanager
def run_from(*folders, module):
    """Imports a module as if it were run from a folder; what stands there is forgotten after."""
    places = tuple(str(ROOT / folder) for folder in folders)
    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            patch.syspath_prepend(place)
        # `python benchmarks/...` sets how a GPU's memory is taken.
        patch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
        yield importlib.import_module(module)
        for name, loaded in list(sys.modules.items()):
            if str(getattr(loaded, "__file__", "")).startswith(places):
                del sys.modules[name]
