"""Builds the sdist and the wheel, looks into both, and tests the wheel in an empty environment.

Run as `python -m tests.project.distributions` from the root of the repository; `--quick` runs fewer
tests. It exits with 1 and says what is wrong. pip fetches the build backend and JAX.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Mapping, Sequence, Set

from tests.support.markdown_pages import links

PACKAGE = "jmp_autocast"
# What the repository holds and no sdist: signposts for readers, and the script of the CI.
NOT_IN_SDIST = ("interpreters", "policies", ".ci/")
# What the backend adds.
ADDED_TO_SDIST = {"PKG-INFO"}
# They need no optional dependency, so that the environment can be as empty as a user's.
TESTS = (
    "project/test_imports.py",
    "policies/test_policy_files.py",
    "transform/test_unknown_primitives.py",
    "derivatives/test_source_view_primitive.py",
)
MORE_TESTS = (
    "derivatives/test_source_views.py",
    "policies/test_levels.py",
    "policies/test_rules.py",
    "loops",
    "loss_scaling/test_gradients.py",
)
TEST_PACKAGES = ("pytest", "pytest-xdist", "hypothesis")


def run(*command: object, cwd: pathlib.Path | None = None) -> str:
    """Runs a command and returns what it prints; its failure ends the program."""
    words = [str(word) for word in command]
    # Neither the checkout nor settings of the caller may be found by what runs.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-5000:]}")
    return done.stdout


def repository_files(scratch: pathlib.Path) -> set[str]:
    """Returns the files of the working tree that .gitignore does not name, in git or not yet."""
    git = ["git", f"--git-dir={scratch / 'git'}", "--work-tree=."]
    run(*git, "init", "-q")
    return set(run(*git, "ls-files", "--others", "--exclude-standard").splitlines())


def sdist_files(path: pathlib.Path) -> set[str]:
    """Returns the files of an sdist, relative to its one folder."""
    with tarfile.open(path) as archive:
        return {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}


def wheel_files(path: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of a wheel with their bytes."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_equal(what: str, found: set[str], expected: set[str]) -> None:
    """Ends the program where two sets of files differ."""
    if found != expected:
        missing, extra = sorted(expected - found), sorted(found - expected)
        sys.exit(f"{what}: missing {missing}, too many {extra}")
    print(f"{what}: {len(found)} files", flush=True)


def check_description(metadata: str) -> None:
    """Ends the program where the page of a package index would have a link that leads nowhere."""
    description = metadata.partition("\n\n")[2]
    readme = pathlib.Path("README.md").read_text(encoding="utf-8")
    if description.partition("\n")[0] != readme.partition("\n")[0]:
        sys.exit("the description of the wheel is not the README")
    if found := re.findall(r"\]\((?!https?://|#)[^)]*\)|src(?:set)?=\S*", description):
        sys.exit(f"the description of the wheel refers to files of the repository: {found}")


def dead_links(texts: Mapping[str, str], files: Set[str]) -> list[str]:
    """Returns the links between pages of an sdist that lead to a file which it lacks.

    Args:
        texts: The pages, by their paths.
        files: All files.
    """
    inside = ((page, target) for page, text in texts.items() for target in links(text))
    places = (
        (page, posixpath.normpath(posixpath.join(posixpath.dirname(page), target.split("#")[0])))
        for page, target in inside
        if target[0] != "#" and not re.match(r"[a-z][a-z+.-]*:", target)
    )
    return [f"{page}: {place}" for page, place in places if place not in files]


def build(scratch: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Builds the sdist, the wheel from it and the wheel from the tree; checks what they hold."""
    tree = repository_files(scratch)
    from_sdist, from_tree = scratch / "dist", scratch / "direct"
    run(sys.executable, "-m", "build", "--outdir", from_sdist, ".")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", from_tree, ".")
    (sdist,), (wheel,) = from_sdist.glob("*.tar.gz"), from_sdist.glob("*.whl")
    (direct,) = from_tree.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)

    expected = {name for name in tree if not name.startswith(NOT_IN_SDIST)}
    check_equal("sdist", sdist_files(sdist), expected | ADDED_TO_SDIST)
    packed = wheel_files(wheel)
    (metadata,) = (text for name, text in packed.items() if name.endswith("/METADATA"))
    check_description(metadata.decode("utf-8"))
    package = {name for name in packed if ".dist-info/" not in name}
    check_equal("wheel", package, {name for name in tree if name.startswith(f"{PACKAGE}/")})
    if packed != wheel_files(direct):
        sys.exit("the wheel of the sdist is not the wheel of the tree")
    return sdist, wheel


def install(wheel: pathlib.Path, scratch: pathlib.Path) -> pathlib.Path:
    """Installs a wheel into an empty environment; returns its Python."""
    venv.create(scratch / "environment", with_pip=True)
    python = scratch / "environment" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel)
    # Without one optional dependency, and from a folder that is not the checkout.
    place = run(python, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)", cwd=scratch)
    if scratch not in pathlib.Path(place.strip()).parents:
        sys.exit(f"not the wheel was imported, but {place}")
    run(python, "-m", "pip", "check")
    run(python, "-m", "pip", "install", "-q", *TEST_PACKAGES)
    return python


def test(python: pathlib.Path, sdist: pathlib.Path, scratch: pathlib.Path, quick: bool) -> None:
    """Runs tests of the sdist against the installed wheel."""
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "sdist", filter="data")
    (source,) = (scratch / "sdist").iterdir()
    shutil.rmtree(source / PACKAGE)  # only the installed package can be found
    names = TESTS if quick else (*TESTS, *MORE_TESTS)
    tests = [f"tests/{name}" for name in names]
    print(run(python, "-m", "pytest", "-q", *tests, cwd=source).splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    """Does it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run fewer tests against the wheel")
    quick = parser.parse_args(arguments).quick
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder).resolve()
        sdist, wheel = build(scratch)
        python = install(wheel, scratch)
        test(python, sdist, scratch, quick)


if __name__ == "__main__":
    main(sys.argv[1:])
