"""A new primitive, and a new need of readers, are one row each: nothing else has to know them.

The rows are written into a copy of the package, which a process of its own imports.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# From a file to a text of it, and what stands before that text then.
ROWS = {
    "policies/tables.py": ('    CastPolicy.PROMOTE: """\n', "        invented\n"),
    "interpreters/primitives/traits.py": (
        "\n_ROWS: dict[str, str] = {\n",
        '    "invented": "log0",\n',
    ),
    "interpreters/plan/needs.py": (
        "\nROWS = (\n",
        '    Row(Need.INVENTED, frozenset(("invented",)), lambda ctx: ctx.eqn.invars,\n'
        '        frozenset(), "it went wrong", "what was invented", having("saturates")),\n',
    ),
}
MEMBER = (
    "    LOW = enum.auto()\n",
    "        LOW: An",
    "    INVENTED = enum.auto()\n",
    "        INVENTED: An invention.\n",
)

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.extend.core import Primitive
from jmp_autocast import BF16, explain
sys.path.insert(0, sys.argv[1])
import generate_planner

invented_p = Primitive("invented")
invented_p.def_abstract_eval(lambda aval: aval)

def inverse(w, x):
    return invented_p.bind(1 - jax.nn.sigmoid(x @ w))

def gate(w, x):
    gate = jnp.tanh(x @ w)
    return invented_p.bind(gate), gate @ w

w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
for fn in (inverse, gate):
    for row in explain(fn, w, x, policy=BF16).rows:
        print(fn.__name__, row.primitive, *row.results, row.reason, row.cause, sep=" | ")
print(generate_planner.needs())
for risk in explain(gate, w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).at_risk:
    print("at risk", risk.primitive, risk.because, sep=" | ")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the program prints with a package that has the rows."""
    folder = tmp_path_factory.mktemp("package")
    package = folder / "jmp_autocast"
    shutil.copytree(ROOT / "jmp_autocast", package)
    for name, (text, row) in ROWS.items():
        path = package / name
        before = path.read_text(encoding="utf-8")
        assert before.count(text) == 1
        path.write_text(before.replace(text, text + row), encoding="utf-8")
    needs = package / "interpreters/plan/needs.py"
    member, described, added, words = MEMBER
    text = needs.read_text(encoding="utf-8").replace(member, member + added)
    needs.write_text(text.replace(described, words + described), encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "docs" / "tools")]
    environment = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


pytestmark = pytest.mark.process


def test_the_planner_knows_the_primitive(printed):
    """The pole at 0 asks for the digits of the sigmoid next to 1, as that of a logarithm does."""
    assert "inverse | logistic | float32" in printed
    assert "inverse | invented | float32" in printed


def test_the_planner_and_explain_know_the_need(printed):
    """A tanh with another reader in 16 bits is asked for, and the reason names who asks."""
    assert "gate | tanh | float32 | LOG_GUARD | read by what was invented" in printed


def test_the_page_knows_the_need(printed):
    assert "| `INVENTED` | An invention | it went wrong |" in printed


def test_what_is_at_risk_knows_the_need(printed):
    assert "at risk | tanh | It is read by what was invented: it went wrong." in printed
