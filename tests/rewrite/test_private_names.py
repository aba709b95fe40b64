"""Without any one of JAX's private names the package imports and works."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, autocast
from jmp_autocast.interpreters.compat import private_names as table, trace_context
from jmp_autocast.interpreters.compat.private_names import PRIVATE, private
from tests.support.markdown_pages import ROOT
from tests.support.page_runner import run_page
from tests.support.processes import environment_without_devices

# In a process in which the package finds no private name of JAX: neither by an import nor by a
# look-up.
WITHOUT_ANY = """
import builtins, importlib, sys
import jax, jax.numpy as jnp

plain_import, plain_import_module = builtins.__import__, importlib.import_module

def refuse(name, importer, fromlist=()):
    names = [name, *(f"{name}.{part}" for part in fromlist or ())]
    hidden = [n for n in names if n.startswith("jax._src") or n in HIDDEN]
    if importer.startswith("jmp_autocast") and hidden:
        raise ImportError(f"{hidden} is hidden")

def importing(name, globals=None, locals=None, fromlist=(), level=0):
    if not level:
        refuse(name, (globals or {}).get("__name__", ""), fromlist)
    return plain_import(name, globals, locals, fromlist, level)

def import_module(name, package=None):
    refuse(name, sys._getframe(1).f_globals.get("__name__", ""))
    return plain_import_module(name, package)

HIDDEN = {HIDDEN!r}
builtins.__import__, importlib.import_module = importing, import_module
from jmp_autocast import autocast

loss = autocast(lambda w, x: jnp.sum(jax.nn.relu(x @ w)), jnp.bfloat16)
print(jax.jit(jax.grad(loss))(jnp.ones((4, 2)), jnp.ones((3, 4))).dtype)
"""


@pytest.mark.parametrize("name", PRIVATE)
def test_the_installed_jax_has_it(name):
    assert private(name) is not None


def test_what_is_not_there():
    looked_up = table._looked_up
    assert looked_up("jax._src.config.no_such_name") is None
    assert looked_up("jax._src.no_such_module.name") is None


@pytest.fixture(params=PRIVATE)
def hidden(request, monkeypatch):
    """The look-up, without one name."""
    left = {name: text for name, text in PRIVATE.items() if name != request.param}
    monkeypatch.setattr(table, "PRIVATE", left)
    jax.clear_caches()
    return request.param


@pytest.mark.usefixtures("as_users_run_it")
def test_the_readme_runs(hidden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert private(hidden) is None
    run_page((ROOT / "README.md").read_text(encoding="utf-8"), "README.md")


def program(w, x):
    h = jax.checkpoint(lambda h: jnp.tanh(h @ w), policy=jax.checkpoint_policies.dots_saveable)(x)
    h, _ = jax.lax.scan(lambda h, _: (jax.nn.relu(h @ w) + jax.nn.relu(h), None), h, None, 2)
    return jnp.sum(h @ w.T)


def test_gradients_are_the_same(hidden):
    w, x = np.eye(4, dtype=np.float32) / 2, np.arange(8, dtype=np.float32).reshape(2, 4)
    found = jax.jit(jax.grad(autocast(program, policy=BF16)))(w, x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, jax.grad(program)(w, x), rtol=0.02, atol=0.05)


def test_what_depends_on_settings_is_in_no_cache(monkeypatch):
    assert trace_context() == trace_context()
    monkeypatch.setattr(table, "PRIVATE", {})
    assert trace_context() != trace_context()


@pytest.mark.process
def test_the_package_imports_without_all_of_them():
    modules = {name.rpartition(".")[0] for name in PRIVATE}
    source = WITHOUT_ANY.replace("{HIDDEN!r}", repr(modules))
    run = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment_without_devices(),
    )
    assert run.stdout.strip() == "float32", run.stderr
