"""The progress bar of what takes long: rich's, where it is installed and someone looks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

Show = Callable[..., None]
"""Says what is being done: takes a text, the number of steps done, and the most there are."""


@contextlib.contextmanager
def shown_progress(progress: bool | None) -> Iterator[Show]:
    """Shows a progress bar on the standard error stream, or nothing.

    Args:
        progress: True to have one, False to have none, None where rich is installed and the stream
            is a terminal.

    Yields:
        The function that says what is being done.

    Raises:
        ImportError: ``progress`` is True, and rich is not installed.
        TypeError: ``progress`` is no bool.
    """
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(
            f"progress must be True, False or None, got {progress!r}. Leave it out to have a "
            "progress bar in a terminal."
        )
    if progress is None:
        installed = importlib.util.find_spec("rich") is not None
        progress = installed and sys.stderr is not None and sys.stderr.isatty()
    if not progress:
        yield lambda text, done=None, total=None: None
        return
    try:
        # As modules: one that is blocked raises here, also where rich itself has been imported.
        from_rich = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console").Console(stderr=True)
    except ImportError as error:
        raise ImportError(
            "progress=True needs rich: pip install rich. With progress=False there is no progress "
            "bar."
        ) from error
    columns = [
        from_rich.TextColumn("{task.description}", markup=False),
        from_rich.BarColumn(),
        from_rich.MofNCompleteColumn(),
        from_rich.TimeElapsedColumn(),
    ]
    with from_rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, done=None, total=None: bar.update(
            task, description=text, completed=done, total=total
        )
