"""The command line: explain, stats, check, audit and compiled, for a function of a module.

It may import everything else of the package, and nothing imports it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .actions import ACTIONS
from .parser import parser
from .targets import UsageError

# As `grep` and `diff` do: 1 is an answer, 2 is a wrong use.
WRONG_USE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments, None for those of the process.

    Returns:
        The exit code: 0 if all is well, 1 if what was asked for was found to be wrong, 2 for a
        wrong use. Exceptions of the user's own code are raised.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        options = parser().parse_args(argv)
        return ACTIONS[options.command](options)
    except SystemExit as stop:  # argparse has said what is wrong
        return WRONG_USE if stop.code else 0
    except UsageError as error:
        print(f"jmp-autocast: {error}", file=sys.stderr)
        return WRONG_USE
