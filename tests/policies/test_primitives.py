"""Every primitive of JAX has a place in the tables."""

import pathlib
import subprocess
import sys

import pytest

from jmp_autocast.policies import DATA_MOVEMENT, DEFAULT_RULES, STRUCTURAL, CastPolicy, tables

ROOT = pathlib.Path(__file__).parents[2]


# In a process of its own: other tests register primitives, and import more of JAX than others.
# Without Pallas: its primitives are bound inside a kernel, and JAX 0.10.0 imports all of Mosaic's.
LIST_PRIMITIVES = """
import contextlib, gc, importlib, jax, jax.scipy.special
from jax.extend.core import Primitive
for name in ("multihost_utils", "sparse", "rnn", "fused", "shard_alike", "buffer_callback",
             "compute_on", "overlap", "scheduling_groups", "xla_metadata", "hijax"):
    with contextlib.suppress(ImportError):  # some are not in every version
        importlib.import_module(f"jax.experimental.{name}")
print(*sorted({p.name for p in gc.get_objects() if isinstance(p, Primitive)}))
"""
# JAX binds these in no jaxpr.
IN_NO_PROGRAM = frozenset(("custom_jvp_call_jaxpr", "zeros_like"))
ADVICE = "add them to jmp_autocast/policies/tables.py, run python docs/tools/generate_primitives.py"


@pytest.mark.process
def test_every_primitive_of_the_installed_jax_is_placed():
    command = [sys.executable, "-W", "ignore", "-c", LIST_PRIMITIVES]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    names = set(printed.split())
    assert len(names) > 300
    missing = sorted(names - set(DEFAULT_RULES) - STRUCTURAL - IN_NO_PROGRAM)
    assert not missing, f"no policy for {', '.join(missing)}: {ADVICE}"


def test_no_primitive_is_both_structural_and_in_the_table():
    assert not STRUCTURAL & set(DEFAULT_RULES)


@pytest.mark.parametrize("name", ["exp", "dot_general", "scan"])
def test_a_name_that_is_placed_twice_is_an_error(monkeypatch, name):
    keep = f"{tables._NAMES[CastPolicy.KEEP]} {name}"
    monkeypatch.setitem(tables._NAMES, CastPolicy.KEEP, keep)
    with pytest.raises(AssertionError, match=f"primitive '{name}' is placed twice"):
        tables._build()


def test_data_movement_promotes():
    assert {DEFAULT_RULES[name] for name in DATA_MOVEMENT} == {CastPolicy.PROMOTE}
