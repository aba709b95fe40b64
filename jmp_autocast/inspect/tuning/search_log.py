"""The log of `tune`: what was tried, as lines of JSON, so that a search can be gone on with.

The first line says which search it is. Then comes a line with the largest magnitudes, and one for
each trial. Lines are only ever added, and each is on the disk before the next trial starts.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...call.arguments import name_of
from ...policies.errors import wrong_type
from ..export import cut, plain

_START = '{"jmp_autocast.tune": 1'


class Trial(NamedTuple):
    """One run of a program with some candidates in float32: a line of the log.

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
        if path is not None and not isinstance(path, str | os.PathLike):
            must = "log must be a path, a string or a pathlib.Path"
            raise wrong_type(must, path, "Write one such as 'tune.jsonl'.")
        self._path = None if path is None else pathlib.Path(path)
        self._name = f"log={str(path)!r}"
        self._largest: list[float] | None = None
        self.trials: dict[frozenset[int], Trial] = {}
        mine = json.loads(_text({"jmp_autocast.tune": 1, **header}))
        lines = self._lines()
        if not lines:
            self._write(mine)
            return
        theirs = json.loads(lines[0])
        for key in (*mine, *theirs):
            was, now = (cut(json.dumps(each.get(key)), 120) for each in (theirs, mine))
            if theirs.get(key) != mine.get(key):
                raise LogError(
                    f"{self._name} is of another search: its {key} is {was}, but here it is {now}. "
                    "Pass another path, or delete the file."
                )
        for number, line in enumerate(lines[1:], 2):
            try:
                self._take(json.loads(line), len(mine["candidates"]))
            except (ValueError, TypeError):
                raise LogError(
                    f"{self._name}: line {number} is not a trial of tune. Delete the line to "
                    "continue with the others, or pass another path."
                ) from None

    def largest(self, measure: Callable[[], Sequence[float]]) -> list[float]:
        """Returns the largest magnitude of each candidate, from the file or measured."""
        if self._largest is None:
            self._largest = list(measure())
            self._write({"largest": self._largest})
        return self._largest

    def add(self, trial: Trial) -> Trial:
        """Keeps a trial."""
        self.trials[frozenset(trial.kept)] = trial
        self._write(trial._asdict())
        return trial

    def _write(self, data: dict[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_text(data) + "\n")
            # A process that is killed, or a machine that stops, loses the run that is under way
            # and no other: a run of a large model may take hours.
            file.flush()
            os.fsync(file.fileno())

    def _lines(self) -> list[str]:
        """Returns the whole lines of the file; what a killed process left of the last one goes."""
        if self._path is None or not self._path.exists():
            return []
        content = self._path.read_bytes()
        # A file of somebody else is never written to. One that ends within the first word of a log
        # was torn there, and is begun anew.
        if not content.startswith(_START.encode()) and not _START.encode().startswith(content):
            raise LogError(
                f"{self._name} is not a log of tune, and stays unchanged. Pass the path of a log, "
                "or of a file that does not exist."
            )
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(self._path, end)
        return content[:end].decode("utf-8").splitlines()

    def _take(self, data: Any, candidates: int) -> None:
        """Keeps what a line says.

        Raises:
            TypeError: The line is neither a trial nor magnitudes.
            ValueError: It does not fit the search, or a number is none.
        """
        if "largest" in data:
            self._largest = [float(x) for x in data["largest"]]
            fits = len(self._largest) == candidates
        else:
            kept, passed, error = Trial(**data)
            error = None if error is None else float(error)  # "inf" is a float in quotes
            self.trials[frozenset(kept)] = Trial(tuple(kept), passed, error)
            fits = isinstance(passed, bool) and set(kept) <= set(range(candidates))
        if not fits:
            raise ValueError


def _text(data: dict[str, Any]) -> str:
    """Returns a line; dtypes, cast policies and functions are their names."""
    named = lambda x: getattr(x, "name", None) or name_of(x)  # noqa: E731
    return json.dumps(plain(data, finite=True), default=named)
