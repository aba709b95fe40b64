"""The options of the command line."""

from __future__ import annotations

import argparse
import math
import pathlib

from ..policies.choices import LEVELS

_EXAMPLES = """\
examples:
  jmp-autocast explain model:loss --args model:arguments --compute-dtype bfloat16
  jmp-autocast explain model:loss --args model:arguments --gradient --html report.html
  jmp-autocast stats model:loss --args model:arguments --json stats.json
  jmp-autocast check model:loss --args model:arguments --gradient
  jmp-autocast tune model:loss --batches model:batches --tolerance 0.01 --output policy.toml

where model.py, in the current directory, holds

  def loss(params, x): ...
  def arguments(): return params, x              # or (params, x), {"keyword": value}
  def batches(): return [(params, x1), (params, x2)]

exit codes: 0 all is well; 1 check found a fault, or tune cannot reach the tolerance;
2 wrong use. Exceptions of your own code show their traceback.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="jmp-autocast",
        description="See and choose the precision of a JAX function.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_common(added)
        return added

    explain = command("explain", "which equation runs in which dtype, and why; nothing is computed")
    _add_arguments(explain)
    explain.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write a page as well")
    stats = command("stats", "how often each primitive runs in each dtype; nothing is computed")
    _add_arguments(stats)
    check = command("check", "run the function, and find what makes an infinity or NaN")
    _add_arguments(check)
    check.add_argument(
        "--overflow",
        action="store_true",
        help="run it in float32, and find what a float16 could not hold",
    )
    for each in (stats, check):
        each.add_argument(
            "--as-is", action="store_true", help="look at the function without autocast"
        )
    _add_tune(command("tune", "find the smallest set of operations to keep in float32"))
    return top


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="the function in float32")
    parser.add_argument(
        "--policy", type=pathlib.Path, metavar="FILE", help="a policy, as Policy.save writes it"
    )
    parser.add_argument(
        "--compute-dtype", choices=("float16", "bfloat16"), help="float16 by default"
    )
    parser.add_argument("--level", choices=LEVELS, help="how much is lowered")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the result as JSON as well"
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--args",
        required=True,
        metavar="MODULE:FUNCTION",
        help="returns a tuple of arguments, or a pair of that and a dict of keyword arguments",
    )
    parser.add_argument(
        "--gradient",
        action="store_true",
        help="the gradient by the first argument, instead of the function",
    )


def _add_tune(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--batches", metavar="MODULE:FUNCTION", help="returns an iterable of tuples of arguments"
    )
    source.add_argument(
        "--args", metavar="MODULE:FUNCTION", help="returns a tuple of arguments: the one batch"
    )
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument(
        "--tolerance", type=_tolerance, help="the largest relative error against float32"
    )
    goal.add_argument(
        "--accept",
        metavar="MODULE:FUNCTION",
        help="says whether the function in mixed precision, which it is given, is good enough",
    )
    parser.add_argument(
        "--gradient",
        action="store_true",
        help="the gradient by the first argument counts as a result as well",
    )
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="save the policy here")
    parser.add_argument(
        "--log", type=pathlib.Path, metavar="FILE", help="what was tried, to go on after a stop"
    )


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number such as 0.01, got {text!r}")
    return value
