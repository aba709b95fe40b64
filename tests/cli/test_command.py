"""The command line: what it prints and writes, its exit codes, and what it says of a wrong use."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import jmp_autocast
from jmp_autocast import BF16, FP16, Policy
from jmp_autocast.cli import main
from tests.support.hlo_texts import TEXTS, module_of

MODEL = """
import functools
import jax, jax.numpy as jnp
import jmp_autocast
from jmp_autocast import BF16, autocast

def loss(params, x, scale=1.0):
    with jax.named_scope("energy"):
        h = jnp.square(x @ params["w"]) * scale
    with jax.named_scope("head"):
        return jnp.mean(jnp.tanh(h * 1e-5) @ params["v"])

def by_hand(params, x):
    w, x = params["w"].astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return jnp.mean(jax.nn.softmax(x @ w))

def careful(params, x):
    w, x = params["w"].astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return jnp.mean(jax.nn.softmax((x @ w).astype(jnp.float32)))

wrapped = autocast(loss, policy=BF16)
number = 3

class Namespace:
    loss = staticmethod(loss)

def arguments(size=10.0):
    params = {"w": jnp.full((16, 16), 2.0), "v": jnp.full((16, 1), 1.0)}
    return params, jnp.full((4, 16), size)

def small(): return arguments(0.1)
def with_keywords(): return arguments(), {"scale": 0.1}
def shapes(): return jax.eval_shape(arguments)
def no_tuple(): return list(arguments())
def batches(): return (arguments(size) for size in (1.0, 10.0))
def no_batches(): return [1, 2]
def accept(mixed): return bool(jnp.abs(mixed(*arguments()) - loss(*arguments())) < 0.5)
def never(mixed): return False
def broken(): raise ZeroDivisionError("in the user's code")
"""

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current directory with a module of the user's."""
    tmp_path.joinpath("users_model.py").write_text(MODEL, encoding="utf-8")
    tmp_path.joinpath("imports_what_is_not_there.py").write_text("import nobody_has_this", "utf-8")
    package = tmp_path / "users_package"
    package.mkdir()
    package.joinpath("__init__.py").write_text("", "utf-8")
    package.joinpath("part.py").write_text("from users_model import *", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith(("users_", "imports_what"))]:
        del sys.modules[name]


def run(line):
    return main(line.split())


LOSS = "users_model:loss --args users_model:arguments"
KEYWORDS = LOSS.replace("arguments", "with_keywords")


@pytest.mark.usefixtures("folder")
def test_explain(capsys):
    assert run(f"explain {LOSS} --compute-dtype bfloat16") == 0
    text = capsys.readouterr().out
    assert text.startswith("loss: 100.0 % of matmul and convolution FLOPs in bfloat16")
    assert "LOWER_PRECISION" in text


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "names", "dtype"),
    [
        ("--device h100", ["H100 SXM"], "bfloat16"),
        ("--device t4 --device v5e", ["T4", "TPU v5e"], "float16"),
        ("--device all", ["GB200", "H100 SXM", "T4", "TPU v5e", "CPU"], "bfloat16"),
    ],
)
def test_explain_for_another_device(line, names, dtype, capsys):
    assert run(f"explain {LOSS} {line} --json report.json") == 0
    text = capsys.readouterr().out
    assert f"\nno gain on {names[0]}" in text.replace("roofline    ", "\n")
    found = json.loads(pathlib.Path("report.json").read_text("utf-8"))
    devices = [time["device"] for time in found["devices"]]
    assert [name for name in names if name in devices] == names
    assert found["compute_dtype"] == dtype
    assert len(devices) == len(names) or line.endswith("all")


@pytest.mark.usefixtures("folder")
def test_explain_what_is_kept(capsys):
    assert run(f"explain {LOSS} --residuals recompute --json report.json") == 0
    text = capsys.readouterr().out
    assert "without residuals='recompute'" in text
    assert "computed again, and not kept" in text
    kept = json.loads(pathlib.Path("report.json").read_text("utf-8"))["kept"]
    assert 0 < kept["nbytes"] <= kept["declared_nbytes"]


@pytest.mark.usefixtures("folder")
def test_explain_a_gradient(capsys):
    assert run(f"explain {LOSS} --gradient --json report.json --html page.html") == 0
    assert capsys.readouterr().out.endswith("wrote page.html\nwrote report.json\n")
    rows = json.loads(pathlib.Path("report.json").read_text("utf-8"))["rows"]
    assert sum(row["primitive"] == "dot_general" for row in rows) > 2
    assert pathlib.Path("page.html").read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("stats users_model:loss", "bfloat16"),
        ("stats users_model:loss --compute-dtype float16", "float16"),
        ("stats users_model:loss --policy default.toml --compute-dtype float16", "float16"),
        ("stats users_model:loss --compute-dtype bfloat16", "bfloat16"),
        ("stats users_model:loss --policy policy.toml", "bfloat16"),
        ("stats users_model:loss --as-is", "float32"),
        ("stats users_model:wrapped", "bfloat16"),
        ("stats users_model:wrapped --gradient", "bfloat16"),
        ("stats users_package.part:Namespace.loss", "bfloat16"),
    ],
)
def test_stats(line, dtype, capsys):
    BF16.save("policy.toml")
    Policy().save("default.toml")
    assert run(f"{line} --args users_model:arguments --json stats.json") == 0
    counts = json.loads(pathlib.Path("stats.json").read_text("utf-8"))
    operands = {
        tuple(c["operands"]) for c in counts if c["primitive"] in ("dot_general", "accumulate")
    }
    assert (dtype,) in operands
    assert f"{dtype} ->" in capsys.readouterr().out


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == f"jmp-autocast {jmp_autocast.__version__}"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (f"check {LOSS} --compute-dtype float16", 1, "square makes 64 infinities"),
        (f"check {LOSS}", 0, "all is finite"),
        ("check users_model:loss --args users_model:small", 0, "all is finite"),
        ("check users_model:loss --args users_model:arguments --as-is", 0, "all is finite"),
        ("check users_model:loss --args users_model:arguments --overflow", 1, "beyond float16"),
        ("check users_model:loss --args users_model:small --overflow", 0, "nothing beyond"),
        ("check users_model:wrapped --args users_model:arguments --gradient", 0, "all is finite"),
        (f"check {KEYWORDS} --compute-dtype float16", 1, "square makes"),
        (
            "check users_model:loss --args users_model:arguments --level tensor_cores",
            0,
            "all is finite",
        ),
    ],
)
def test_check(line, code, said, capsys):
    assert run(f"{line} --json check.json") == code
    assert said in capsys.readouterr().out
    assert json.loads(pathlib.Path("check.json").read_text("utf-8"))["rows"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "code", "kinds"),
    [
        ("audit users_model:by_hand", 1, ["exponential", "loss"]),
        ("audit users_model:by_hand --ignore loss", 1, ["exponential"]),
        ("audit users_model:by_hand --ignore loss --ignore exponential", 0, []),
        ("audit users_model:careful", 0, []),
        ("audit users_model:careful --gradient", 0, []),
        ("audit users_model:loss", 0, []),
        ("audit users_model:wrapped", 0, []),
    ],
)
def test_audit(line, code, kinds, capsys):
    assert run(f"{line} --args users_model:shapes --json found.json") == code
    found = json.loads(pathlib.Path("found.json").read_text("utf-8"))
    assert [finding["kind"] for finding in found["findings"]] == kinds
    text = capsys.readouterr().out
    assert all(f"\n{kind}: " in text for kind in kinds)
    assert ("users_model.py:" in text) == bool(kinds)


COMPILED = "compiled users_model:loss --args users_model:small"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (COMPILED, 0, "100.0 % in float32"),
        (f"{COMPILED} --require float32=100", 0, "100.0 % of the FLOPs of products in float32"),
        (
            f"{COMPILED} --require bfloat16=95",
            1,
            "0.0 % of the FLOPs of products in bfloat16, 95 %",
        ),
        (f"{COMPILED} --compute-dtype bfloat16 --gradient", 0, "plan  "),
        ("compiled users_model:loss --args users_model:with_keywords", 0, "jit_loss on cpu"),
        ("compiled dump.txt", 0, "unknown: the text does not say"),
        ("compiled dump.txt --require bfloat16=95", 0, "100.0 % of the FLOPs"),
        ("compiled nothing.txt --require bfloat16=0", 1, "there is no product"),
        ("compiled unknown.txt --require bfloat16=0", 1, "1 products of unknown FLOPs"),
    ],
)
def test_compiled(line, code, said, capsys):
    pathlib.Path("dump.txt").write_text((TEXTS / "gpu_cublas.txt").read_text("utf-8"), "utf-8")
    x = "%x = bf16[8,4]{1,0} parameter(0)"
    pathlib.Path("nothing.txt").write_text(module_of(f"ROOT {x}"), "utf-8")
    product = module_of(x, "ROOT %y = bf16[8,4]{1,0} ragged-dot(%x, %x)")
    pathlib.Path("unknown.txt").write_text(product, "utf-8")
    assert run(f"{line} --json made.json --html made.html") == code
    assert said in capsys.readouterr().out
    assert "products" in json.loads(pathlib.Path("made.json").read_text("utf-8"))
    assert pathlib.Path("made.html").read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.usefixtures("folder")
def test_tune(capsys):
    line = "tune users_model:loss --batches users_model:batches --tolerance 0.01 --gradient"
    line += " --compute-dtype float16"
    assert run(f"{line} --output policy.toml --log log.jsonl --json report.json") == 0
    text = capsys.readouterr().out
    assert text.startswith("loss: ")
    assert text.endswith("wrote policy.toml\nwrote report.json\n")
    assert Policy.load("policy.toml").rules
    trials = pathlib.Path("log.jsonl").read_text("utf-8").splitlines()
    assert len(trials) == json.loads(pathlib.Path("report.json").read_text("utf-8"))["runs"] + 2
    assert run(f"check {LOSS} --policy policy.toml") == 0
    capsys.readouterr()
    assert run(line.replace("0.01", "0.1") + " --log log.jsonl") == 2
    assert "is of another search: its tolerance is 0.01" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_tune_by_a_callable_on_one_batch(capsys):
    line = "tune users_model:loss --args users_model:arguments --accept users_model:accept"
    assert run(f"{line} --compute-dtype float16 --output policy.toml") == 0
    assert Policy.load("policy.toml") != FP16
    BF16.save("start.toml")
    assert run(f"{line} --policy start.toml --output policy.toml") == 0
    assert Policy.load("policy.toml") == BF16
    capsys.readouterr()
    assert run(line.replace(":accept", ":never")) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("jmp-autocast: accept returns False for loss also with all")
    assert captured.out == ""


@pytest.mark.usefixtures("folder")
def test_tune_with_keywords():
    line = "tune users_model:loss --args users_model:with_keywords --tolerance 0.5"
    assert run(f"{line} --json report.json") == 0
    assert json.loads(pathlib.Path("report.json").read_text("utf-8"))["name"] == "loss"


TUNE = "tune users_model:loss --batches users_model:batches --tolerance"

WRONG = {
    "compiled no_file.txt": "no_file.txt is no file. Name a file of an XLA dump",
    "compiled users_model.py": "it is no HLO module; it starts",
    f"{COMPILED} --require bfloat=95": "such as bfloat16=95, got 'bfloat=95'",
    f"{COMPILED} --require bfloat16": "such as bfloat16=95, got 'bfloat16'",
    f"{COMPILED} --require bfloat16=101": "such as bfloat16=95, got 'bfloat16=101'",
    f"{COMPILED} --device v5": "device='v5' is no device whose compiler runs without it",
    "": "the following arguments are required: COMMAND",
    "explian users_model:loss": "invalid choice: 'explian'",
    "explain users_model:loss": "the following arguments are required: --args",
    f"explain {LOSS} --compute-dtype float64": "invalid choice: 'float64'",
    f"explain {LOSS} --level o2": "invalid choice: 'o2'",
    f"explain {LOSS} --tolerance 1": "unrecognized arguments: --tolerance",
    f"explain {LOSS} --residuals all": "or a share from 0 to 1, got 'all'",
    f"explain {LOSS} --residuals 2": "it must be from 0",
    f"explain {LOSS} --residuals auto --gradient": "a gradient keeps nothing for another pass",
    f"explain {LOSS} --device h1000": "device='h1000' must be a known device. Did you mean 'h100'?",
    f"stats {LOSS} --device h100": "unrecognized arguments: --device",
    f"audit {LOSS} --ignore los": "invalid choice: 'los'",
    f"audit {LOSS} --policy bf16.toml": "unrecognized arguments: --policy",
    f"{TUNE} none": "must be a positive number such as 0.01, got 'none'",
    f"{TUNE} 0": "must be a positive number such as 0.01, got '0'",
    "tune users_model:loss --tolerance 1": "one of the arguments --batches --args is required",
    "tune users_model:loss --batches users_model:batches": "--tolerance --accept is required",
    "explain users_model --args users_model:arguments": "must be MODULE:FUNCTION, such as",
    "explain :loss --args users_model:arguments": "must be MODULE:FUNCTION",
    "explain users_model: --args users_model:arguments": "must be MODULE:FUNCTION",
    "explain .users_model:loss --args users_model:arguments": "'.users_model' names no module",
    "explain no_such_module:loss --args users_model:arguments": "no module named 'no_such_module'",
    "explain users_package.no:f --args users_model:arguments": "no module named 'users_package.no'",
    "explain users_model:los --args users_model:arguments": "has no 'los'. Did you mean 'loss'?",
    "explain users_model:loss.x --args users_model:arguments": "'loss' has no 'x'",
    "explain users_model:number --args users_model:arguments": "must be callable, got a value of",
    "explain users_model:loss --args users_model:argument": "--args users_model:argument: ",
    "explain users_model:loss --args users_model:no_tuple": "must return a tuple of arguments",
    f"explain {LOSS} --policy no.toml": "--policy no.toml: No such file or directory",
    f"explain {LOSS} --policy users_model.py": "--policy: Policy file 'users_model.py' is not",
    f"explain {LOSS} --policy bf16.toml --compute-dtype float16": "contradicts bf16.toml, which",
    f"explain {LOSS} --html no/page.html": "cannot write no/page.html: No such file",
    f"stats {LOSS} --as-is --compute-dtype bfloat16": "--as-is and --overflow take no policy",
    f"check {LOSS} --overflow --policy bf16.toml": "or --as-is and --overflow",
    "check users_model:loss --args users_model:shapes": "returns a jax.ShapeDtypeStruct, and check",
    "explain users_model:wrapped --args users_model:arguments --level o1": "has its own policy",
    "tune users_model:wrapped --args users_model:arguments --tolerance 1": "tune tries policies",
    "tune users_model:loss --batches users_model:no_batches --tolerance 1": "batches[0] must be a",
    "tune users_model:loss --batches users_model:number --tolerance 1": "must be callable",
    f"{TUNE} 0.1 --output no/policy.toml": "no/policy.toml: no is not a writable folder",
    f"{TUNE} 0.1 --log bf16.toml": "is not a log of tune",
    f"{TUNE} 0.1 --accept users_model:accept": "not allowed with argument --tolerance",
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("line", "message"), WRONG.items(), ids=range(len(WRONG)))
def test_a_wrong_use_is_one_line_without_a_traceback(line, message, capsys):
    BF16.save("bf16.toml")
    before = sorted(os.listdir())
    assert run(line) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert message in last
    assert last.startswith("jmp-autocast")
    assert "Traceback" not in captured.err
    assert set(os.listdir()) - set(before) <= {"__pycache__"}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("explain users_model:loss --args users_model:broken", ZeroDivisionError),
        ("check users_model:broken --args users_model:arguments", TypeError),
        ("explain imports_what_is_not_there:f --args users_model:arguments", ModuleNotFoundError),
        (f"{TUNE} 0.1 --policy bf16.toml".replace(":batches", ":broken"), ZeroDivisionError),
    ],
)
def test_exceptions_of_the_users_own_code_are_raised(line, error):
    BF16.save("bf16.toml")
    with pytest.raises(error):
        run(line)


@pytest.mark.parametrize("command", ["", "explain", "stats", "check", "audit", "tune"])
def test_help(command, capsys):
    assert run(f"{command} --help") == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert "exit codes: 0 all is well; 1 check found a fault" in text
    own = {
        "explain": ["--html", "--device"],
        "audit": ["--ignore"],
        "tune": ["--tolerance", "--log"],
    }
    for option in own.get(command, []):
        assert option in text


def process(command, folder):
    """Runs a command as a user does, with the package from where the tests have it."""
    root = str(pathlib.Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.process
def test_python_m(folder):
    command = [sys.executable, "-m", "jmp_autocast", *f"check {LOSS}".split()]
    command += ["--compute-dtype", "float16"]
    done = process(command, folder)
    assert done.returncode == 1, done.stderr
    assert "square makes 64 infinities" in done.stdout, done.stderr
    assert done.stderr == ""


@pytest.mark.process
def test_the_script(folder):
    """What pip writes for the entry of pyproject.toml: it knows nothing of the directory."""
    script = folder / "bin" / "jmp-autocast"
    script.parent.mkdir()
    module, _, function = entry_point().partition(":")
    lines = ["import sys", f"from {module} import {function}", f"sys.exit({function}())"]
    script.write_text("\n".join(lines), "utf-8")
    done = process([sys.executable, str(script), *f"explain {LOSS}".split()], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss: 100.0 %")
    broken = process(
        [sys.executable, str(script), *f"explain {LOSS.replace('arguments', 'broken')}".split()],
        folder,
    )
    assert broken.returncode == 1
    assert "ZeroDivisionError: in the user's code" in broken.stderr


def entry_point():
    import tomllib

    path = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    return tomllib.loads(path.read_text("utf-8"))["project"]["scripts"]["jmp-autocast"]
