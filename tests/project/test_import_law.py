"""Which room may import which, as CONTRIBUTING.md says; and who reads parameters of equations."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "jmp_autocast"

# Each room, from the ground up, and the rooms below it that it may use.
LAW = {
    "policies": set(),
    "scopes": {"policies"},
    "frame_memory": set(),
    "loss_scaling": set(),
    "optimizers": {"interpreters/compat"},
    "backend": set(),
    "interpreters/compat": set(),
    "interpreters/primitives": {"interpreters/compat", "policies"},
    "interpreters/regions": {"interpreters/compat", "policies", "scopes"},
    "interpreters/before": {
        "interpreters/regions",
        "interpreters/primitives",
        "interpreters/compat",
        "policies",
    },
    "interpreters/plan": {
        "backend",
        "interpreters/before",
        "interpreters/regions",
        "interpreters/primitives",
        "interpreters/compat",
        "policies",
        "scopes",
    },
    "interpreters/after": {
        "interpreters/plan",
        "interpreters/primitives",
        "interpreters/compat",
        "policies",
    },
    "interpreters/rewrite": {
        "interpreters/after",
        "interpreters/plan",
        "interpreters/regions",
        "interpreters/primitives",
        "interpreters/compat",
        "policies",
    },
    "interpreters/keep": {"interpreters/primitives", "interpreters/compat", "policies", "scopes"},
    "interpreters/__init__": {"interpreters/plan", "interpreters/rewrite"},
}
UPPER = {
    "call": {"backend", "interpreters", "policies", "scopes"},
    "keep_less": {"call", "frame_memory", "interpreters", "policies"},
    "autocast": {
        "backend",
        "call",
        "frame_memory",
        "interpreters",
        "keep_less",
        "policies",
        "scopes",
    },
    "cast_params": {"autocast", "backend", "call", "interpreters", "policies"},
    "quantize_params": {"call", "cast_params", "interpreters", "policies"},
    "inspect": {
        "autocast",
        "backend",
        "call",
        "interpreters",
        "keep_less",
        "policies",
        "scopes",
    },
    "cli": {"autocast", "call", "inspect", "keep_less", "policies", "scopes"},
    "integrations": {
        "autocast",
        "call",
        "inspect",
        "interpreters",
        "loss_scaling",
        "policies",
        "scopes",
    },
    "__init__": {
        "autocast",
        "cast_params",
        "inspect",
        "keep_less",
        "loss_scaling",
        "policies",
        "scopes",
    },
    "__main__": {"cli"},
}


def modules(folder=PACKAGE):
    """(parts of the module's path in the package, its syntax tree) of each file."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield parts, ast.parse(path.read_text(encoding="utf-8"))


def imported(parts, tree):
    """The path in the package of each module that a module imports, type checking included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            # A package's __init__ is one level further in than the package itself.
            base = parts[: len(parts) - node.level]
            target = (*base, *(node.module.split(".") if node.module else ()))
            if target:
                yield target
            else:
                yield from ((alias.name,) for alias in node.names)


def room_of(parts):
    if parts[0] == "interpreters":
        return "/".join(parts[:2]) if len(parts) > 1 else "interpreters"
    return parts[0]


def arrows(parts, tree):
    own = room_of(parts)
    for target in imported(parts, tree):
        room = room_of(target)
        if room != own and not (own.startswith("interpreters/__init__") and room == "interpreters"):
            yield own, room, "/".join(target)


ARROWS = sorted({arrow for parts, tree in modules() for arrow in arrows(parts, tree)})


def test_every_room_is_in_the_law():
    rooms = {room_of(parts) for parts, _ in modules()}
    assert rooms == set(LAW) | set(UPPER)


@pytest.mark.parametrize("room", [*LAW, *UPPER])
def test_a_room_imports_what_it_may(room):
    allowed = {**LAW, **UPPER}[room]
    tops = {name.split("/")[0] for name in allowed}
    found = [
        f"{room} takes {module}"
        for own, other, module in ARROWS
        if own == room and other not in allowed
        if not (room in UPPER and other.split("/")[0] in tops)
    ]
    assert not found


def test_the_interpreters_have_few_arrows_and_no_circle():
    inside = {
        (own, other)
        for own, other, _ in ARROWS
        if own.startswith("interpreters/") and other.startswith("interpreters/")
        if "__init__" not in own
    }
    assert len(inside) <= 20
    order = ["compat", "primitives", "regions", "before", "plan", "after", "rewrite", "keep"]
    for own, other in inside:
        assert order.index(own.split("/")[1]) > order.index(other.split("/")[1]), (own, other)


def test_no_circle_inside_a_room_of_the_interpreters():
    edges = {}
    for parts, tree in modules(PACKAGE / "interpreters"):
        edges["/".join(parts)] = {"/".join(target) for target in imported(parts, tree)}
    done = set()

    def visit(name, above):
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done and name in edges:
            for other in edges[name]:
                visit(other, [*above, name])
            done.add(name)

    for name in edges:
        visit(name, [])


def reads_of_parameters(tree):
    """Lines where a parameter of an equation is read by its name."""
    for node in ast.walk(tree):
        subscripted = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if subscripted and isinstance(node.slice.value, str):
            owner = node.value
        elif called and node.func.attr in ("get", "pop"):
            owner = node.func.value
        else:
            continue
        if isinstance(owner, ast.Attribute) and owner.attr == "params":
            yield node.lineno


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('eqn.params["jaxpr"]', [1]),
        ('eqn.params.get("precision")', [1]),
        ('e.params["a"]["b"]', [1]),
        ('params["w"]', []),
        ("eqn.params", []),
    ],
)
def test_the_reader_finds_reads_of_parameters(source, found):
    assert list(reads_of_parameters(ast.parse(source))) == found


def test_parameters_of_equations_are_read_in_two_rooms_alone():
    allowed = ("interpreters/compat", "interpreters/primitives")
    found = [
        f"{'/'.join(parts)}:{line}"
        for parts, tree in modules()
        if room_of(parts) not in allowed
        for line in reads_of_parameters(tree)
    ]
    assert not found


# --- sizes ----------------------------------------------------------------------------------


def lines_of(node, source):
    """The number of lines of a function that are no docstring, comment or blank line."""
    lines = set(range(node.lineno, node.end_lineno + 1))
    if ast.get_docstring(node) is not None:
        lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    texts = source.splitlines()
    return sum(bool(t := texts[i - 1].strip()) and not t.startswith("#") for i in lines)


def test_no_function_is_over_60_lines_and_no_file_over_400():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if len(source.splitlines()) > 400:
            found.append(path.name)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and lines_of(node, source) > 60:
                found.append(f"{path.name}: {node.name}")
    assert not found
