"""The checks of this project, each in an environment of its own: `nox -s NAME`."""

from __future__ import annotations

import json
import pathlib
import time
import tomllib

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
PYTHONS = ["3.11", "3.12", "3.13"]
OLDEST_PYTHON, *NEWER_PYTHONS = PYTHONS
nox.options.sessions = [
    *("lint", "types", "doctests", "docs"),
    f"tests_oldest-{OLDEST_PYTHON}",
    *(f"tests_newest-{python}" for python in NEWER_PYTHONS),
]


def oldest_jax() -> str:
    """Returns the first release that pyproject.toml allows, such as ``jax==0.10.0``."""
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirement = next(r for r in project["dependencies"] if r.startswith("jax>="))
    return requirement.replace(">=", "==")


@nox.session(python=PYTHONS)
def tests_oldest(session: nox.Session) -> None:
    """The tests with the oldest JAX; pip picks Flax and the others to match."""
    session.install("-e", ".[dev]", oldest_jax())
    session.run("python", "-m", "pytest", *(session.posargs or ["tests"]))


@nox.session(python=PYTHONS)
def tests_newest(session: nox.Session) -> None:
    """The tests with the newest JAX; the last release for Python 3.11 is of the 0.10 series."""
    session.install("-e", ".[dev]")
    session.run("python", "-m", "pytest", *(session.posargs or ["tests"]))


@nox.session(python=[OLDEST_PYTHON, NEWER_PYTHONS[-1]])
def any_cpu(session: nox.Session) -> None:
    """The tests and doctests, compiled for older CPUs and for this one: half an hour on 2 cores.

    XLA adds up in another order on each kind of CPU, and a page that prints what stands near a
    threshold prints something else there. The older ones have no bfloat16 units. For SSE4.2 XLA
    itself compiles no float16: those tests are reported as skipped.
    """
    session.install("-e", ".[dev]")
    for kind in ("SSE4_2", "AVX2", "AVX512", None):
        env = {"XLA_FLAGS": f"--xla_cpu_max_isa={kind}"} if kind else {}
        session.run("python", "-m", "pytest", *(session.posargs or ["tests"]), env=env)
        command = ("python", "-m", "pytest", "-n", "0", "--doctest-modules", "jmp_autocast")
        session.run(*command, env=env)


@nox.session(python=NEWER_PYTHONS[-1])
def coverage(session: nox.Session) -> None:
    """The tests with the line and branch coverage of the package: 95 % and 90 % at least."""
    session.install("-e", ".[dev]")
    report = str(pathlib.Path(session.create_tmp()).resolve() / "coverage.json")
    arguments = ("--cov", "--cov-report=term", f"--cov-report=json:{report}")
    session.run("python", "-m", "pytest", *arguments, *(session.posargs or ["tests"]))
    session.run("python", "-m", "tests.project.coverage_rates", report)


@nox.session(python=OLDEST_PYTHON)
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    session.install("ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=OLDEST_PYTHON)
def types(session: nox.Session) -> None:
    """Pyright on the package, and whether every public symbol has a known type."""
    session.install("-e", ".[dev]")
    session.run("pyright")
    session.run("pyright", "--verifytypes", "jmp_autocast", "--ignoreexternal")


@nox.session(python=OLDEST_PYTHON)
def doctests(session: nox.Session) -> None:
    """The examples in the docstrings of the package."""
    session.install("-e", ".[dev]")
    session.run("python", "-m", "pytest", "-n", "0", "--doctest-modules", "jmp_autocast")


@nox.session(python=NEWER_PYTHONS[-1])
def docs(session: nox.Session) -> None:
    """Generated pages are up to date, and the site builds without a warning."""
    session.install("-e", ".[dev]")
    for generator in sorted(pathlib.Path("docs/tools").glob("generate_*.py")):
        session.run("python", str(generator), "--check")
    session.run("python", "-m", "sphinx", "-W", "-b", "html", "docs", "docs/_build/html")


@nox.session(python=NEWER_PYTHONS[-1])
def site(session: nox.Session) -> None:
    """The site from the extra ``docs`` alone, by the command of the README."""
    session.install("-e", ".[docs]")
    folder = pathlib.Path(session.create_tmp()).resolve() / "html"
    session.run("python", "-m", "sphinx", "-W", "-b", "html", "docs", str(folder))


@nox.session(python=OLDEST_PYTHON)
def dtypes(session: nox.Session) -> None:
    """Which programs of the corpus change their dtypes against the committed recording, and why.

    ``nox -s dtypes -- COMMIT`` compares with that of a commit, and with two commits runs nothing.
    """
    about = json.loads(pathlib.Path("tests/corpus/recording/about.json").read_text("utf-8"))
    pinned = [f"{name}=={version}" for name, version in about.items() if name != "python"]
    session.install("-e", ".[dev]", *pinned)
    session.run("python", "-m", "tests.corpus", "dtypes", *session.posargs)


@nox.session(python=NEWER_PYTHONS[-1])
def guides(session: nox.Session) -> None:
    """Each guide as a newcomer follows it: what it installs in a new environment, and prints."""
    session.run("python", "-m", "tests.project.follow_guides", "--fresh", *session.posargs)


@nox.session(python=OLDEST_PYTHON)
def examples(session: nox.Session) -> None:
    """All examples with their own sizes: 15 minutes on 2 cores at most."""
    session.install("-e", ".[examples]")
    folder = pathlib.Path(session.create_tmp()).resolve()
    start = time.monotonic()
    for example in sorted(pathlib.Path("examples").glob("*.py")):
        if "def main(" in example.read_text(encoding="utf-8"):
            session.run("python", str(example), "--output", str(folder / example.stem))
    if (minutes := (time.monotonic() - start) / 60) > 15:
        session.error(f"The examples took {minutes:.1f} minutes.")


@nox.session(python=OLDEST_PYTHON)
def compilers(session: nox.Session) -> None:
    """What the TPU compiler makes of training steps, without a TPU: small ones, two minutes."""
    session.install("-e", ".[bench-tpu]")
    session.run("python", "benchmarks/compilers", "tpu", "--quick", *session.posargs)
    session.run("python", "-m", "tests.project.check_tpu")


@nox.session(python=NEWER_PYTHONS[0])
def maxtext(session: nox.Session) -> None:
    """MaxText's training step by policy and by hand, as the TPU compiler makes it: small ones."""
    # MaxText names its requirements in extras alone, of which each is a whole cluster.
    needs = ["aqtp", "drjax", "einops", "grain", "jinja2", "ml-collections", "omegaconf"]
    needs += ["orbax-checkpoint", "pathwaysutils", "pillow", "pydantic", "qwix", "sentencepiece"]
    needs += ["sympy", "tensorboardX", "tiktoken", "tokamax", "transformers"]
    session.install("-e", ".[bench-tpu]", "maxtext==0.2.5", *needs)
    session.run("python", "benchmarks/maxtext_step.py", "llama", "mixtral", "--check")


@nox.session(python=[OLDEST_PYTHON, NEWER_PYTHONS[-1]])
def package(session: nox.Session) -> None:
    """The sdist and the wheel, and tests of the wheel in an environment without the checkout."""
    session.install("build", "twine")
    session.run("python", "-m", "tests.project.distributions", *session.posargs)
    session.install("jax", "optax")
    session.run("python", "benchmarks/import_time.py", "--limit", "1.3")


@nox.session(python=[OLDEST_PYTHON, NEWER_PYTHONS[-1]])
def long(session: nox.Session) -> None:
    """What takes too long for every run: all programs of others, and 20,000 random programs."""
    session.install("-e", ".[dev]", *([oldest_jax()] if session.python == OLDEST_PYTHON else []))
    session.run("python", "-m", "tests.third_party")
    session.run("python", "-m", "tests.fuzz", "--programs", "20000", *session.posargs)
