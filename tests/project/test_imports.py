"""What `import jmp_autocast` brings with it: JAX, NumPy, optax and what those need, no more."""

import ast
import functools
import importlib.metadata
import inspect
import pathlib
import subprocess
import sys

import pytest

import jmp_autocast
from jmp_autocast.call.forms import OPTIONS

PACKAGE = pathlib.Path(jmp_autocast.__file__).parent

OPTIONAL = """
    clu equinox flax haiku jinja2 jmp keras matplotlib orbax pandas rich sklearn tensorboardX
    tensorflow torch
    """.split()

# Modules of the package that a user imports by name, without the one that each is for.
INTEGRATIONS_WITHOUT_A_LIBRARY = ["jmp_autocast.integrations"]

PRINT_NEW = """
import sys
import jax, numpy, optax
before = {name.partition(".")[0] for name in sys.modules}
import MODULE
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(after - before - set(sys.stdlib_module_names)))
print(*sorted(after))
"""


@functools.cache
def imported_with(module):
    """What a fresh process imports with a module, as (beside JAX, NumPy and optax; in all)."""
    program = [sys.executable, "-c", PRINT_NEW.replace("MODULE", module)]
    root = PACKAGE.parent  # the installed package or the checkout, as in this process
    out = subprocess.run(program, capture_output=True, text=True, check=True, cwd=root).stdout
    return tuple(set(line.split()) for line in out.splitlines())


@pytest.mark.process
@pytest.mark.parametrize("module", ["jmp_autocast", *INTEGRATIONS_WITHOUT_A_LIBRARY])
def test_no_optional_dependency_is_imported(module):
    new, everything = imported_with(module)
    assert new == {"jmp_autocast"}
    assert not everything & set(OPTIONAL)


def test_the_version_is_written_once():
    """The distribution's is read from the package when it is built."""
    assert jmp_autocast.__version__ == importlib.metadata.version("jmp-autocast")
    written = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if f'"{jmp_autocast.__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert written == ["__init__.py"]


def third_party_imports(path):
    """(module, whether it is imported with the file) of each import of another distribution."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_import = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        for name in names:
            root = name.partition(".")[0]
            if root not in sys.stdlib_module_names and root != "jmp_autocast":
                yield root, id(node) in at_import


def test_only_integrations_import_optional_dependencies_with_the_file():
    required = {"jax", "numpy", "optax"}
    found = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for root, at_import in third_party_imports(path)
        if at_import and root not in required
    }
    assert found == {"integrations"}


def test_dir_shows_public_names_alone():
    rooms = {"inspect", "integrations", "loss_scaling", "optimizers", "policies"}
    assert set(dir(jmp_autocast)) == {*jmp_autocast.__all__, *rooms, "__version__"}
    for name in jmp_autocast.__all__:
        assert getattr(jmp_autocast, name) is not None


def test_help_shows_the_signature_that_users_write():
    names = list(inspect.signature(jmp_autocast.autocast).parameters)
    assert names == ["fn", *OPTIONS]
