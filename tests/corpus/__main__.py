"""``python -m tests.corpus dtypes [OLD [NEW]]``."""

from __future__ import annotations

import argparse
import os
import sys

from . import __doc__ as about
from .sources import prepare


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.corpus", None, about, formatter_class=plain)
    parser.add_argument("command", choices=["dtypes"])
    parser.add_argument("old", nargs="?", help="a commit; the recording of this tree if none")
    parser.add_argument(
        "new", nargs="?", help="a later one; what the code of this tree does if none"
    )
    parser.add_argument("--record", action="store_true", help="write the committed recording anew")
    parser.add_argument("--programs", type=int, default=20, help="differing programs to print")
    return parser.parse_args(arguments)


def with_fixed_hashes() -> None:
    """Starts this command again if the order of sets is random.

    numpyro's lower bound of the evidence is traced in the order of a set of names.
    """
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.corpus", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    prepare()
    from .contract import changed, record_anew

    if options.record:
        record_anew()
        return 0
    return int(changed(options.old, options.new, options.programs) > 0)


if __name__ == "__main__":
    with_fixed_hashes()
    sys.exit(main())
