"""The files that the repository's host reads: workflow, forms, citation, conduct."""

import json
import pathlib
import subprocess
import sys
import tomllib

import pytest
import yaml

import jmp_autocast
from jmp_autocast.policies.tables import RULES_VERSION

ROOT = pathlib.Path(__file__).parents[2]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def workflow():
    return read(GITHUB / "workflows" / "tests.yml")


def rows(workflow):
    return [
        row for job in workflow["jobs"].values() for row in job["strategy"]["matrix"]["include"]
    ]


@pytest.mark.process
def test_the_workflow_runs_sessions_of_nox_on_their_python(workflow):
    wanted = [(row["session"], row["python"]) for row in rows(workflow)]
    names = [name for name, _ in wanted]
    command = [sys.executable, "-m", "nox", "--list", "--json", "-s", *names]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    found = [(session["session"], session["python"]) for session in json.loads(listed)]
    assert sorted(found) == sorted(wanted)
    for job in workflow["jobs"].values():
        assert job["steps"][-1]["run"] == "nox -s ${{ matrix.session }}"


def test_the_workflow_covers_every_python_with_the_oldest_and_the_newest_jax(workflow):
    prefix = "Programming Language :: Python :: 3."
    minors = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    wanted = {f"tests_{jax}-3.{minor}" for jax in ("oldest", "newest") for minor in minors}
    found = {row["session"] for row in rows(workflow)}
    assert found >= {*wanted, "lint", "types", "doctests", "docs"}


def test_the_citation_is_of_this_version():
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == jmp_autocast.__version__


def test_the_changelog_lists_the_rules():
    """What a policy that was saved under other rules warns of."""
    assert f"| {RULES_VERSION} |" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
