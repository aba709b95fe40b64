"""The options of the commands; `__main__.py` shows them in use."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from .targets import GPUS, TPUS, NotInstalled, check_installed, prepare_environment

_DESCRIPTION = "Compiles training steps for TPUs and GPUs on a machine that has none."
_LEVELS = ("O0", "O1", "O2", "O3")
_TEXTS = pathlib.Path(__file__).parents[1] / "compiled_texts"


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    # After `prepare_environment`: these import JAX.
    from .batches import MEMORY
    from .optimizers import OPTIMIZERS
    from .programs import CASES, LOSSES
    from .sharding import SIZES, parse_mesh

    parser = argparse.ArgumentParser(prog="compilers", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--quick", action="store_true", help="small sizes, two minutes at most")
    shared.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    shared.add_argument(
        "--keep", type=pathlib.Path, default=_TEXTS, help="the folder for the programs' text"
    )
    shared.add_argument("--markdown", action="store_true", help="write into RESULTS.md")
    # O2 is JAX's default, and alone tiles products well. At O0 the TPU compiler needs a fifth of
    # the time, for as many fusions and temporary bytes within 3 %.
    shared.add_argument("--level", default="O2", choices=_LEVELS, help="of the TPU compiler")
    by_model = argparse.ArgumentParser(add_help=False)
    by_model.add_argument("--models", nargs="+", choices=tuple(CASES))
    by_model.add_argument("--variants", nargs="+", choices=tuple(LOSSES), default=None)
    by_model.add_argument("--layers", type=int, help="instead of the case's")
    by_model.add_argument("--batch", type=int, help="instead of the case's")

    for name, targets in (("tpu", tuple(TPUS)), ("gpu", GPUS)):
        command = commands.add_parser(name, parents=[shared, by_model])
        command.add_argument("--targets", nargs="+", choices=targets, default=targets[:1])
    command = commands.add_parser("optimizer", parents=[shared])
    command.add_argument("--targets", nargs="+", choices=(*TPUS, *GPUS), default=("v5e", "h100"))
    command.add_argument("--variants", nargs="+", choices=tuple(OPTIMIZERS), default=None)
    command.add_argument("--unrolled", action="store_true", help="148 arrays and not 18")
    command = commands.add_parser("batches", parents=[shared])
    command.add_argument("--targets", nargs="+", choices=tuple(MEMORY), default=tuple(MEMORY))
    command = commands.add_parser("sharded", parents=[shared])
    command.add_argument("--targets", nargs="+", choices=tuple(TPUS), default=("v5e",))
    command.add_argument("--mesh", type=parse_mesh, default=(16, 1), help="16, or 4x4: with tensor")
    command.add_argument("--size", choices=tuple(SIZES), default="1.3B")
    command.add_argument("--length", type=int, default=2048)
    command.add_argument("--variants", nargs="+", choices=tuple(LOSSES), default=None)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 2 where a compiler is not installed."""
    prepare_environment()
    chosen = options(arguments)
    from .command import run, run_batches

    try:
        for target in chosen.targets:
            check_installed(target)
    except NotInstalled as error:
        print(error)
        return 2
    (run_batches if chosen.command == "batches" else run)(chosen)
    return 0
