"""The log of `tune`: what was tried, as lines of JSON, so that a search can be gone on with.

The first line says which search it is. Then comes a line with the largest magnitudes, and one for
each trial. Lines are only ever added, and each is on the disk before the next trial starts.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...policies.errors import wrong_type
from ..export import cut, json_text

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
        header = json.loads(json_text({"jmp_autocast.tune": 1, **header}))
        lines = self._lines()
        if not lines:
            self._write(header)
            return
        self._check_header(json.loads(lines[0]), header)
        for number, line in enumerate(lines[1:], 2):
            try:
                good = self._take(json.loads(line), len(header["candidates"]))
            except (ValueError, TypeError):
                good = False
            if not good:
                raise LogError(
                    f"{self._name}: line {number} is not a trial of tune. Delete the line to "
                    "continue with the others, or pass another path."
                )

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
            file.write(json_text(data) + "\n")
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

    def _take(self, data: Any, candidates: int) -> bool:
        """Keeps what a line says, and returns whether it fits the search.

        Raises:
            TypeError: The line is neither a trial nor magnitudes.
            ValueError: A number is none.
        """
        if "largest" in data:
            self._largest = [float(x) for x in data["largest"]]
            return len(self._largest) == candidates
        kept, passed, error = Trial(**data)
        error = None if error is None else float(error)  # "inf" is a float in quotes
        self.trials[frozenset(kept)] = Trial(tuple(kept), passed, error)
        return isinstance(passed, bool) and set(kept) <= set(range(candidates))

    def _check_header(self, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
        for key in (*mine, *theirs):
            if theirs.get(key) != mine.get(key):
                was, now = _first_difference(theirs.get(key), mine.get(key))
                raise LogError(
                    f"{self._name} is of another search: its {key} is {was}, but here it is {now}. "
                    "Pass another path, or delete the file."
                )


def _first_difference(theirs: Any, mine: Any) -> tuple[str, str]:
    """Returns the two values as text: of two lists the first element in which they differ."""
    if isinstance(theirs, list) and isinstance(mine, list):
        pairs = itertools.zip_longest(theirs, mine, fillvalue="nothing")
        i, (was, now) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return f"{_shown(was)} at position {i}", _shown(now)
    return _shown(theirs), _shown(mine)


def _shown(value: Any) -> str:
    return "missing" if value is None else cut(json.dumps(value), 120)
