"""``python -m tests.corpus record DIR``, ``compare DIR_A DIR_B`` and ``dtypes``."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

from . import __doc__ as about
from .sources import prepare


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.corpus", None, about, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="write the texts of the corpus to a folder")
    record.add_argument("folder", type=pathlib.Path)
    record.add_argument("--only", default="", help="a pattern that 'source: name' matches")
    record.add_argument("--quick", action="store_true", help="a few programs of every source")
    record.add_argument("--plans", action="store_true",
                        help="only in which dtypes programs compute, and why")  # fmt: skip
    compare = commands.add_parser("compare", help="print what differs between two folders")
    compare.add_argument("old", type=pathlib.Path)
    compare.add_argument("new", type=pathlib.Path)
    compare.add_argument("--only", default="", help="a pattern of 'source: name: section'")
    compare.add_argument("--common", action="store_true",
                         help="what only one folder has is no difference")  # fmt: skip
    compare.add_argument("--dtypes", action="store_true", help="another reason is no difference")
    compare.add_argument("--lines", type=int, default=14, help="lines of each difference")
    compare.add_argument("--programs", type=int, default=20, help="differing programs to print")
    dtypes = commands.add_parser("dtypes", help="print which programs change their dtypes, and why")
    dtypes.add_argument("old", nargs="?", help="a commit; the recording of this tree if none")
    dtypes.add_argument(
        "new", nargs="?", help="a later one; what the code of this tree does if none"
    )
    dtypes.add_argument("--record", action="store_true", help="write the committed recording anew")
    dtypes.add_argument("--programs", type=int, default=20, help="differing programs to print")
    return parser.parse_args(arguments)


def with_fixed_hashes() -> None:
    """Starts this command again if the order of sets is random.

    A program may be traced in the order of a set of names.
    """
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.corpus", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})


def main(arguments: list[str] | None = None) -> int:
    options = vars(parsed(arguments))
    command = options.pop("command")
    if command == "dtypes":
        prepare()
        from .contract import changed, record_anew

        if options.pop("record"):
            record_anew()
            return 0
        return int(changed(**options) > 0)
    if command == "record":
        prepare()
        from .record import Choice, record

        record(options.pop("folder"), Choice(**options))
        return 0
    from .compare import Options, compare

    old, new = options.pop("old"), options.pop("new")
    return int(compare(old, new, Options(**options)) > 0)


if __name__ == "__main__":
    with_fixed_hashes()
    sys.exit(main())
