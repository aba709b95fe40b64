"""JAX names without a compatibility promise stand in ``interpreters/compat`` alone.

Read from the source: every import and every dotted name that starts at ``jax``, and the names of
attributes that JAX's objects have without documenting them.
"""

import ast
import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast.interpreters import compat
from jmp_autocast.interpreters.compat.private_names import PRIVATE

ROOT = pathlib.Path(__file__).parents[2]
COMPAT = ROOT / "jmp_autocast" / "interpreters" / "compat"

# The modules that JAX's page on API compatibility covers, and those that its reference documents
# beside them. Not `core`, `interpreters`, `extend`, `experimental`, `example_libraries`, `lib`.
COVERED = frozenset(
    """
    ad_checkpoint custom_batching custom_derivatives debug distributed dlpack dtypes errors export
    ffi flatten_util image lax monitoring nn numpy ops profiler random ref scipy sharding stages
    test_util tree tree_util typing
    """.split()
)

# docs.jax.dev: the reference pages of `Jaxpr`, `ClosedJaxpr`, `JaxprEqn`, `Var`, `Literal` and
# `Primitive`.
DOCUMENTED = frozenset(
    """
    jaxpr consts literals constvars invars outvars eqns effects debug_info in_avals out_avals
    primitive params source_info ctx replace pretty_print aval val
    name bind multiple_results impl def_impl def_abstract_eval abstract_eval
    """.split()
)

# What tests may use beside the public names, and why.
IN_TESTS = {
    "jax.extend.core.Primitive": "a package brings primitives of its own by this class",
    "jax.interpreters.mlir": "the one place where such a primitive gets its lowering",
    "jax.extend.core.primitives": "`call` and `closed_call`, which no public function emits",
    "jax.experimental": "a feature in progress that users meet is a case to test",
    "jax._src.dispatch": "where JAX makes an eager operation, which the suite keeps compiled",
    "jax._src.compiler": "where JAX compiles a program, which the suite keeps",
    "jax._src.cache_key": "what JAX finds a compiled program by",
    "jax._src.interpreters.mlir": "where JAX makes contexts to lower in, which the suite keeps",
    ".str_short": "how JAX prints a type, in the texts that the corpus compares",
}

# What the autocast for newcomers uses: it is one file, with JAX alone.
IN_DOCS = {"jax.extend.core.Literal": "the documented class of the literals of a jaxpr"}

# What benchmarks may use beside them.
IN_BENCHMARKS = {
    "jax.experimental.topologies": "the one way to compile for a device that is not there",
    "jax.experimental.pallas.ops.tpu.splash_attention": "the kernel of MaxText, to be decorated",
    "jax.extend.core.jaxpr_as_fun": "a finalised jaxpr as a function, for converters",
    "jax.experimental.jax2tf": "the way to TFLite",
    "jax.interpreters.mlir": "the way to Core ML, whose converter takes a module",
    "jaxlib.mlir.ir": "as above",
}


def imports(tree):
    """(line, dotted name, the name it gets in the file, what that one stands for) per import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                bound = (alias.asname, alias.name) if alias.asname else (root, root)
                yield node.lineno, alias.name, *bound
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name, alias.asname or alias.name, name


def names_used(tree):
    """(line, name): dotted names from an import on, aliases written out, and other attributes.

    An attribute of anything but a module is written with a leading dot.
    """
    stands_for = {}
    for line, name, bound, meaning in imports(tree):
        yield line, name
        stands_for[bound] = meaning
    inner = set()
    for node in ast.walk(tree):  # outer attributes come first
        if isinstance(node, ast.Attribute) and node not in inner:
            names, at = [], node
            while isinstance(at, ast.Attribute):
                names.append(at.attr)
                at = at.value
                inner.add(at)
            root = at.id if isinstance(at, ast.Name) else None
            if root in stands_for:
                yield node.lineno, ".".join([stands_for[root], *reversed(names)])
            else:
                names = names[:-1] if root in ("self", "cls") else names
                yield from ((node.lineno, f".{name}") for name in names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            names = [x.value for x in node.args[1:2] if isinstance(x, ast.Constant)]
            yield from ((node.lineno, f".{name}") for name in names)


def is_public(name):
    if name.startswith("."):
        return name[1:] not in UNDOCUMENTED
    root, *rest = name.split(".")
    if root != "jax":
        return root != "jaxlib"
    if any(part.startswith("_") and not part.startswith("__") for part in rest):
        return False
    is_module = bool(rest) and importlib.util.find_spec(f"jax.{rest[0]}") is not None
    return not is_module or rest[0] in COVERED


def undocumented_attributes():
    """Names that the objects of a jaxpr have, and that neither JAX nor NumPy documents."""
    closed = jax.make_jaxpr(lambda x: x + 1)(1.0)
    eqn = closed.eqns[0]
    objects = (closed, compat.body_of(closed), eqn, *eqn.invars, eqn.primitive)
    objects += (eqn.invars[0].aval, eqn.ctx, eqn.source_info)
    names = {name for kind in (*map(type, objects), compat.Tracer) for name in dir(kind)}
    arrays = {name for name in dir(jnp.zeros(1)) if not name.startswith("_")}
    public = (jax.ShapeDtypeStruct, np.ndarray, dict, list, str, tuple, frozenset)
    documented = DOCUMENTED.union(arrays, *map(dir, public))
    return {name for name in names - documented if not name.startswith("__")}


UNDOCUMENTED = undocumented_attributes()


def not_public(source):
    """(line, name) of each name in a program that JAX does not promise to keep."""
    return sorted({used for used in names_used(ast.parse(source)) if not is_public(used[1])})


@pytest.mark.parametrize("folder", ["jmp_autocast", "benchmarks", "examples", "docs", "tests"])
def test_no_other_file_uses_a_name_that_is_not_public(folder):
    allowed = tuple(
        {"tests": IN_TESTS, "benchmarks": IN_BENCHMARKS, "docs": IN_DOCS}.get(folder, ())
    )
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent != COMPAT
        for line, name in not_public(path.read_text(encoding="utf-8"))
        if not any(name == start or name.startswith(f"{start}.") for start in allowed)
    ]
    assert not found, "\n".join(["put these into interpreters/compat:", *found])


def test_compat_is_where_they_are():
    names = {name for _, name in not_public(COMPAT.joinpath("__init__.py").read_text("utf-8"))}
    assert {"jax.extend.core", "jax.core", ".name_stack"} <= names


def test_private_names_stand_in_one_table():
    """No module imports one: each is looked up by its name in the table, and may be gone."""
    found, looked_up = [], set()
    for path in sorted((ROOT / "jmp_autocast").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = (name for _, name in names_used(tree) if re.search(r"^jax\.(.*\.)?_", name))
        found += [f"{path.relative_to(ROOT)} {name}" for name in used if "__" not in name]
        if path.name != "private_names.py":
            texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            looked_up |= {text for text in texts if re.fullmatch(r"jax\.[\w.]+", str(text))}
    assert not found, "\n".join(["put these into compat/private_names.py:", *found])
    assert looked_up >= PRIVATE.keys()
    assert not {name for name in looked_up if "._" in name} - PRIVATE.keys()


def test_no_other_file_of_the_package_asks_for_the_version():
    asked = {"jax.__version__", "jax.__version_info__", "jax.version", "importlib.metadata.version"}
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / "jmp_autocast").rglob("*.py"))
        if path.parent != COMPAT
        for line, name in names_used(ast.parse(path.read_text(encoding="utf-8")))
        if name in asked
    ]
    assert not found
