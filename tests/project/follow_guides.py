"""Follows guides as a newcomer does: each in a process of its own, with the page's own commands.

    python -m tests.project.follow_guides                       # all, with what is installed
    python -m tests.project.follow_guides docs/guides/keras.md  # one of them
    python -m tests.project.follow_guides --fresh               # new environments: needs an index

What a page exports in a shell is set for its process. With ``--fresh`` an environment is made for
each page, and the page's ``pip install`` lines are run in it, from the root of the checkout.
"""

import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

from tests.support.markdown_pages import ROOT, blocks
from tests.support.page_runner import run_page

GUIDES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "docs" / "guides").glob("*.md")
    if "```python" in path.read_text(encoding="utf-8")
)
# Variables of this process that a newcomer's shell does not have.
OURS = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "KERAS_BACKEND", "PYTHONPATH")


def shell_lines(text, start):
    """The commands of a page's shell blocks that start so, as lists of words."""
    lines = [line for b in blocks(text) if b.language == "bash" for line in b.text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(start)]


def exported(text):
    """The environment variables that a page sets in its shell blocks."""
    words = [word for line in shell_lines(text, "export ") for word in line[1:]]
    return dict(word.split("=", 1) for word in words)


def follow(page, python=sys.executable, path=str(ROOT), settings=None):
    """Runs a page in a process of its own; returns its exit status and what it says.

    ``path`` is where the library is imported from; None: where it is installed. ``settings`` are
    environment variables that the page does not export.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment |= exported(text) | ({"PYTHONPATH": path} if path else {}) | (settings or {})
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "tests.project.follow_guides", "--here", folder, page]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    return done.returncode, done.stdout + done.stderr


def run_here(page, folder):
    """Runs a page in this process, in a folder that is not the checkout."""
    text = (ROOT / page).read_text(encoding="utf-8")
    outside = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in outside:  # `python -m` has put it there; the library is an installed one
        sys.path[:] = [p for p in sys.path if pathlib.Path(p).resolve() != ROOT]
    os.chdir(folder)
    run_page(text, page)


def fresh_environment(page, folder):
    """Makes an environment with what the page installs; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(pathlib.Path(folder) / "bin" / "python")
    commands = shell_lines((ROOT / page).read_text(encoding="utf-8"), "pip install ")
    for words in commands or [["pip", "install", "."]]:
        subprocess.run([python, "-m", *words, "-q"], check=True, cwd=ROOT)
    return python


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="paths in the repository; default: all guides")
    parser.add_argument("--fresh", action="store_true", help="in new environments")
    parser.add_argument("--here", metavar="FOLDER", help="in this process and that folder")
    options = parser.parse_args(argv)
    if options.here:
        for page in options.pages:
            run_here(page, options.here)
        return 0
    failed = 0
    for page in options.pages or GUIDES:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            if options.fresh:
                status, said = follow(page, fresh_environment(page, folder), path=None)
            else:
                status, said = follow(page)
        failed += bool(status)
        seconds = time.perf_counter() - start
        print(f"{page}: {'failed' if status else 'as it says'}, {seconds:.0f} s", flush=True)
        if status:
            print(said, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
