"""The contract of dtypes: what is committed of a recording, and who keeps to it.

``tests/corpus/recording`` says of each program of the corpus in which dtypes it computes, and why.
A change that gives a program other dtypes records it anew, and CHANGELOG.md says it for each
release.
"""

from __future__ import annotations

import pathlib
import subprocess
import tarfile
import tempfile

from .compare import Options, compare
from .record import Choice, record

ROOT = pathlib.Path(__file__).parents[2]
RECORDING = pathlib.Path(__file__).parent / "recording"


def record_anew() -> None:
    """Writes the committed recording."""
    for path in RECORDING.glob("*"):
        path.unlink()
    record(RECORDING, Choice(plans=True))


def recorded_at(commit: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes the recording of a commit to a folder, and returns where it is there."""
    path = RECORDING.relative_to(ROOT).as_posix()
    packed = folder / "recording.tar"
    git = ["git", "-C", str(ROOT), "archive", "--output", str(packed), commit, path]
    subprocess.run(git, check=True)
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / path


def changed(old: str | None, new: str | None, programs: int) -> int:
    """Prints which programs change their dtypes, and why; returns how many do.

    Args:
        old: A commit; None for the recording of this tree.
        new: A later one; None for what the code of this tree does.
        programs: How many of them are printed.
    """
    with tempfile.TemporaryDirectory() as name:
        folders = [pathlib.Path(name, title) for title in ("old", "new")]
        for folder in folders:
            folder.mkdir()
        before = recorded_at(old, folders[0]) if old else RECORDING
        after = recorded_at(new, folders[1]) if new else folders[1]
        if not new:
            record(after, Choice(plans=True))
        return compare(before, after, Options(dtypes=True, programs=programs))
