"""The log of `tune`: what was tried, as lines of JSON, so that a search can be gone on with.

The first line says which search it is. Then comes a line with the largest magnitudes, and one for
each trial. Lines are only ever added, and each is on the disk before the next trial starts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from ..export import json_text

VERSION = 1
_START = f'{{"jmp_autocast.tune": {VERSION}'


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a program with some candidates in float32.

    Args:
        kept: The indices of the candidates.
        passed: It was good enough.
        error: The relative error, None where a callable decided.
    """

    kept: tuple[int, ...]
    passed: bool
    error: float | None


class LogError(ValueError):
    """The log is another program's, or none."""


class Log:
    """The trials of one search, in memory and, with a path, in a file.

    Args:
        header: What the search is of, as JSON data.
        path: The file. One that exists is read, and gone on with.

    Raises:
        LogError: The file is of another search, or is no log.
        TypeError: ``path`` is no path.
        OSError: The file cannot be read or written.
    """

    def __init__(self, header: dict[str, Any], path: str | os.PathLike[str] | None) -> None:
        self._path = _as_path(path)
        self._largest: list[float] | None = None
        self.trials: dict[frozenset[int], Trial] = {}
        if self._path is None:
            return
        header = {"jmp_autocast.tune": VERSION, **header}
        lines = self._read()
        if not lines:
            self._write(header)
            return
        _check_header(json.loads(lines[0]), json.loads(json.dumps(header)), self._path)
        for number, line in enumerate(lines[1:], 2):
            self._take(line, len(header["candidates"]), number)

    def largest(self, measure: Callable[[], Sequence[float]]) -> list[float]:
        """Returns the largest magnitude of each candidate, from the file or measured."""
        if self._largest is None:
            self._largest = list(measure())
            self._write({"largest": self._largest})
        return self._largest

    def add(self, trial: Trial) -> Trial:
        """Keeps a trial."""
        self.trials[frozenset(trial.kept)] = trial
        self._write({"kept": trial.kept, "passed": trial.passed, "error": trial.error})
        return trial

    def _write(self, data: dict[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_text(data) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> list[str]:
        """Returns the whole lines of the file; what a killed process left of the last one goes."""
        assert self._path is not None
        if not self._path.exists():
            return []
        content = self._path.read_bytes()
        if not content.startswith(_START.encode()) and not _START.encode().startswith(content):
            raise LogError(
                f"log={str(self._path)!r} is no log of tune, and is left as it is. Pass the path "
                "of a log, or of a file that does not exist."
            )
        end = content.rfind(b"\n") + 1
        if end < len(content):
            with self._path.open("r+b") as file:
                file.truncate(end)
        return content[:end].decode("utf-8").splitlines()

    def _take(self, line: str, candidates: int, number: int) -> None:
        try:
            data = json.loads(line)
            if "largest" in data:
                self._largest = [float(x) for x in data["largest"]]
                good = len(self._largest) == candidates
            else:
                error = None if data["error"] is None else float(data["error"])
                trial = Trial(tuple(data["kept"]), data["passed"], error)
                self.trials[frozenset(trial.kept)] = trial
                good = type(trial.passed) is bool and set(trial.kept) <= set(range(candidates))
        except (ValueError, TypeError, KeyError):
            good = False
        if not good:
            raise LogError(
                f"log={str(self._path)!r}: line {number} is no trial of tune. Delete the line to "
                "go on with the others, or pass another path."
            )


def _as_path(path: Any) -> pathlib.Path | None:
    if path is None or isinstance(path, str | os.PathLike):
        return None if path is None else pathlib.Path(path)
    raise TypeError(
        f"log must be a path, a string or a pathlib.Path, got {path!r} of type "
        f"{type(path).__name__}. Write one such as 'tune.jsonl'."
    )


def _check_header(theirs: dict[str, Any], mine: dict[str, Any], path: pathlib.Path) -> None:
    for key in (*mine, *theirs):
        if theirs.get(key) == mine.get(key):
            continue
        was, now = _first_difference(theirs.get(key), mine.get(key))
        raise LogError(
            f"log={str(path)!r} is of another search: its {key} is {was}, and here it is {now}. "
            "Pass another path, or delete the file."
        )


def _first_difference(theirs: Any, mine: Any) -> tuple[str, str]:
    if isinstance(theirs, list) and isinstance(mine, list):
        for i in range(max(len(theirs), len(mine))):
            was, now = (x[i] if i < len(x) else "nothing" for x in (theirs, mine))
            if was != now:
                return f"{_shown(was)} at position {i}", _shown(now)
    return _shown(theirs), _shown(mine)


def _shown(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
