"""Two newcomers walk from a fresh folder: each is a program of what pages say, and prints this."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support.markdown_pages import ROOT, blocks, markdown_pages
from tests.support.processes import environment_without_devices

WALKS = pathlib.Path(__file__).parent / "walks"

PRINTED = {
    "nnx_trainer": """\
bfloat16 follows float32: True
in 16 bits: 100%
skipped: 1 scale: 65536.0
same bits: True
the base stays: True
the adapters move: True
""",
    "torch_migrant": """\
a bad batch moves nothing: True
skipped: 1 scale: 524288.0
loss below half of the first: True
as in float32: True
torch's result: float16 ours: float32
""",
}


def test_every_walk_is_here():
    assert {path.stem for path in WALKS.glob("*.py")} == {*PRINTED, "__init__"}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", PRINTED)
def test_a_walk_ends_where_the_pages_say(name, tmp_path):
    # Warnings are those of a CPU without float8 units, and of Orbax.
    command = [sys.executable, "-W", "ignore", str(WALKS / f"{name}.py")]
    environment = environment_without_devices() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    assert done.stdout == PRINTED[name]


def names_typed(source):
    """What a program takes from this package: what it imports, and the options that it passes."""
    tree = ast.parse(source)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    ours = [n for n in imports if (n.module or "").startswith("jmp_autocast")]
    typed = {f"{n.module} {alias.name}" for n in ours for alias in n.names}
    names = {alias.asname or alias.name for n in ours for alias in n.names}
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in names:
            typed |= {f"{call.func.id} {keyword.arg}=" for keyword in call.keywords}
    return typed


def said():
    """The same of all pages: of their programs, and the options that their prose names."""
    texts = [path.read_text(encoding="utf-8") for path in markdown_pages()]
    programs = [b.text for text in texts for b in blocks(text) if b.language == "python"]
    code = [program for program in programs if ">>>" not in program]
    return set().union(*map(names_typed, code)), "\n".join(texts)


@pytest.mark.parametrize("name", PRINTED)
def test_nothing_is_typed_that_no_page_says(name):
    programs, prose = said()
    typed = names_typed((WALKS / f"{name}.py").read_text(encoding="utf-8"))
    missing = [
        each
        for each in typed - programs
        # In prose a call is enough: `train_step(loss, has_aux=True)`.
        if not re.search(r"{}\([^`]*{}".format(*map(re.escape, each.split())), prose)
    ]
    assert not missing
