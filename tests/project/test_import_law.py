"""Which room may import which, as CONTRIBUTING.md says; and who reads parameters of equations."""

import ast
import functools
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "jmp_autocast"

# What the table leaves out: doors, which hold no code of their own.
DOORS = {
    "interpreters/__init__": {"interpreters/plan", "interpreters/rewrite"},
}


def law():
    """The rooms of the table in CONTRIBUTING.md, from the ground up, and what each may import."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/.]+)` \| .* \| ([^|]*) \|$", text, re.MULTILINE)
    inside = {p.stem for p in (PACKAGE / "interpreters").iterdir()}
    within = lambda name: f"interpreters/{name}" if name in inside else name
    names = {room.removesuffix(".py").strip("/"): cell for room, cell in rows}
    return {room: set(map(within, re.findall(r"`(\w+)`", cell))) for room, cell in names.items()}


@functools.cache
def modules():
    """The syntax tree of each file, by the parts of its path in the package."""
    paths = {p.relative_to(PACKAGE).with_suffix("").parts: p for p in sorted(PACKAGE.rglob("*.py"))}
    return {parts: ast.parse(path.read_text(encoding="utf-8")) for parts, path in paths.items()}


def file_of(parts):
    """The path of a module's file in the package, None if it is no module."""
    return next((p for p in (parts, (*parts, "__init__")) if p in modules()), None)


def imported(parts, tree):
    """The file of each module that a module imports, at a call or for type checking included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            # A package's __init__ is one level further in than the package itself.
            base = parts[: len(parts) - node.level]
            target = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield file_of((*target, alias.name)) or file_of(target)


def room_of(parts):
    return "/".join(parts[:2]) if parts[0] == "interpreters" else parts[0]


@functools.cache
def imports():
    return {parts: set(imported(parts, tree)) for parts, tree in modules().items()}


@functools.cache
def arrows():
    """(room, room it imports, file of that) of each import between two rooms."""
    return sorted(
        (room_of(own), room_of(other), "/".join(other))
        for own, others in imports().items()
        for other in others
        if room_of(own) != room_of(other)
    )


LAW = law() | DOORS


def test_every_room_is_in_the_law():
    assert {room_of(parts) for parts in modules()} == set(LAW)


@pytest.mark.parametrize("room", LAW)
def test_a_room_imports_what_it_may(room):
    allowed = LAW[room]
    found = [
        f"{room} takes {module}"
        for own, other, module in arrows()
        if own == room and not allowed & {other, other.split("/")[0]}
    ]
    assert not found


def test_a_room_may_import_only_rooms_above_it():
    rooms = [*law(), "interpreters"]
    for room, allowed in law().items():
        assert max(map(rooms.index, allowed - {"interpreters"}), default=-1) < rooms.index(room)


def circles(imports):
    """Yields a text for each circle of files that import each other."""
    done = set()

    def visit(parts, above):
        if parts in above:
            yield " -> ".join(map("/".join, [*above[above.index(parts) :], parts]))
        elif parts not in done:
            for other in sorted(imports[parts]):
                yield from visit(other, [*above, parts])
            done.add(parts)

    for parts in imports:
        yield from visit(parts, [])


def test_no_files_import_each_other_in_a_circle():
    assert not list(circles(imports()))


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


def test_parameters_of_equations_are_read_in_two_rooms_alone():
    allowed = ("interpreters/compat", "interpreters/primitives")
    found = [
        f"{'/'.join(parts)}:{line}"
        for parts, tree in modules().items()
        if room_of(parts) not in allowed
        for line in reads_of_parameters(tree)
    ]
    assert not found
