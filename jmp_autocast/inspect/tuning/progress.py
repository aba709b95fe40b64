"""The progress bar of `tune`: rich's, where it is installed and someone looks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from typing import Any


class Progress(contextlib.AbstractContextManager["Progress"]):
    """A progress bar on the standard error stream, or nothing.

    Args:
        progress: True to have one, False to have none, None where rich is installed and the stream
            is a terminal.

    Raises:
        ImportError: ``progress`` is True, and rich is not installed.
        TypeError: ``progress`` is no bool.
    """

    def __init__(self, progress: bool | None) -> None:
        if progress is not None and not isinstance(progress, bool):
            raise TypeError(
                f"progress must be True, False or None, got {progress!r}. Leave it out to have a "
                "progress bar in a terminal."
            )
        self._rich: Any = None
        self._task: Any = None
        if progress is None:
            found = importlib.util.find_spec("rich") is not None
            progress = found and sys.stderr is not None and sys.stderr.isatty()
        if progress:
            self._rich = _rich_progress()

    def __enter__(self) -> Progress:
        """Shows the bar."""
        if self._rich is not None:
            self._rich.start()
            self._task = self._rich.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the bar."""
        if self._rich is not None:
            self._rich.stop()

    def show(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Says what is being done.

        Args:
            text: What that is.
            done: How many runs are done.
            total: How many it will be at most, as far as that is known.
        """
        if self._rich is not None:
            self._rich.update(self._task, description=text, completed=done, total=total)


def _rich_progress() -> Any:
    try:
        progress = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console")
    except ImportError as error:
        raise ImportError(
            "progress=True needs rich: pip install rich. With progress=False there is no progress "
            "bar."
        ) from error
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        console=console.Console(stderr=True),
        transient=True,
    )
