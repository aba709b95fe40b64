"""Flax names that its API reference leaves out stand in ``integrations/flax_compat.py`` alone."""

import ast
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from .test_public_names import names_used

INTEGRATIONS = pathlib.Path(__file__).parents[2] / "jmp_autocast" / "integrations"
COMPAT = INTEGRATIONS / "flax_compat.py"

# What the integrations use of Flax's reference (flax.readthedocs.io) and of its guides to pytrees
# and to randomness.
DOCUMENTED = frozenset(
    """
    flax.linen flax.linen.Module flax.errors flax.errors.TraceContextError
    flax.nnx flax.nnx.All flax.nnx.DiffState flax.nnx.Module flax.nnx.Not flax.nnx.Optimizer
    flax.nnx.Param flax.nnx.Pytree flax.nnx.RngState flax.nnx.Variable flax.nnx.data
    flax.nnx.from_flat_state flax.nnx.grad flax.nnx.is_data flax.nnx.register_data_type
    flax.nnx.state flax.nnx.to_flat_state flax.nnx.update
    """.split()
)


def undocumented_attributes():
    """Names that a graph and a variable have, that the reference does not explain or JAX shares."""
    objects = (nnx.graphdef(nnx.Dropout(0.5)), nnx.Param(np.zeros(1)))
    names = {name for x in objects for name in dir(x) if not name.startswith("__")}
    public = (jax.Array, np.ndarray, dict, list, str, tuple, frozenset, nnx.Dropout(0.5))
    return names.difference(*map(dir, public))


UNDOCUMENTED = undocumented_attributes()


def not_documented(source):
    return sorted(
        {
            (line, name)
            for line, name in names_used(ast.parse(source))
            if (name.split(".")[0] == "flax" and name not in DOCUMENTED)
            or (name.startswith(".") and name[1:] in UNDOCUMENTED)
            or name == "flax.nnx.Pytree.__setattr__"
        }
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from flax import nnx\nnnx.Module\nnnx.update", []),
        ("from flax import nnx\nnnx.split_context", ["flax.nnx.split_context"]),
        ("from flax.core import lift\nlift.pack", ["flax.core.lift", "flax.core.lift.pack"]),
        ("from flax import nnx\nnnx.Pytree.__setattr__", ["flax.nnx.Pytree.__setattr__"]),
        ("graphdef.num_leaves", [".num_leaves"]),
        ("variable.get_raw_value()", [".get_raw_value"]),
        ("import flax.linen as nn\nnn.transforms.x", ["flax.linen.transforms.x"]),
        ("x.shape\nx.dtype", []),
    ],
)
def test_the_reader_finds_names_that_are_not_documented(source, expected):
    assert [name for _, name in not_documented(source)] == expected


def test_no_other_file_uses_a_name_that_flax_does_not_document():
    found = [
        f"{path.name}:{line} {name}"
        for path in sorted(INTEGRATIONS.glob("*.py"))
        if path != COMPAT
        for line, name in not_documented(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["put these into integrations/flax_compat.py:", *found])


def test_flax_compat_is_where_they_are():
    names = {name for _, name in not_documented(COMPAT.read_text(encoding="utf-8"))}
    assert {"flax.nnx.split_context", "flax.core.lift.pack", ".with_same_outer_index"} <= names
