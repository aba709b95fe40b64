"""See and choose the precision of a JAX function.

examples:
  jmp-autocast explain model:loss --args model:arguments --compute-dtype bfloat16
  jmp-autocast explain model:loss --args model:arguments --gradient --html report.html
  jmp-autocast explain model:loss --args model:arguments --device h100 --device v5e
  jmp-autocast stats model:loss --args model:arguments --json stats.json
  jmp-autocast check model:loss --args model:arguments --gradient
  jmp-autocast audit model:loss --args model:arguments --json findings.json
  jmp-autocast compiled model:loss --args model:arguments --require bfloat16=95
  jmp-autocast compiled dump/module_0042.jit_step.sm_9.0_gpu_after_optimizations.txt

where model.py, in the current directory, holds

  def loss(params, x): ...
  def arguments(): return params, x              # or (params, x), {"keyword": value}

exit codes: 0 all is well; 1 check found a fault, audit a risk, compiled less than is required;
2 wrong use. Exceptions of your own code show their traceback.
"""  # noqa: D405 - as argparse writes its own titles

from __future__ import annotations

import argparse
import importlib
import math
import pathlib
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..devices import as_device
from ..inspect.auditing.kinds import KINDS
from ..keep_less import Residuals, as_choice
from ..policies.choices import LEVELS
from ..policies.dtypes import COMPUTE_DTYPES


def _required(text: str) -> tuple[str, float]:
    dtype, _, percent = text.partition("=")
    try:
        name, least = np.dtype(jnp.dtype(dtype)).name, float(percent)
    except (TypeError, ValueError):
        name, least = "", math.nan
    if not 0 <= least <= 100:
        raise argparse.ArgumentTypeError(
            f"must be a dtype and a percentage such as bfloat16=95, got {text!r}"
        )
    return name, least


def _residuals(text: str) -> Residuals:
    try:
        return as_choice(float(text) if text[:1].isdigit() else text).residuals
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _device(text: str) -> str:
    try:
        return text if text == "all" else as_device(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# --- what each command takes, as `add_argument` takes it, in the order of its help --------------

_Options: TypeAlias = dict[str, dict[str, Any]]

_FILE: dict[str, Any] = {"type": pathlib.Path, "metavar": "FILE"}
_TARGET: dict[str, Any] = {"metavar": "MODULE:FUNCTION"}
_FLAG: dict[str, Any] = {"action": "store_true"}

_COMMON: _Options = {
    "function": {**_TARGET, "help": "the function"},
    "--json": {**_FILE, "help": "write the result as JSON as well"},
}
_POLICY: _Options = {
    "--policy": {**_FILE, "help": "a policy, as Policy.save writes it"},
    "--compute-dtype": {
        "choices": tuple(dtype.name for dtype in COMPUTE_DTYPES),
        "help": "by default that of the device; float32 for a function in float64",
    },
    "--level": {"choices": LEVELS, "help": "how much is lowered"},
}
_ARGS = "returns a tuple of arguments, or a pair of that and a dict of keyword arguments"
_ONE_CALL: _Options = {
    "--args": {**_TARGET, "required": True, "help": _ARGS},
    "--gradient": {**_FLAG, "help": "the gradient by the first argument, instead of the function"},
}
_AS_IS: _Options = {"--as-is": {**_FLAG, "help": "look at the function without autocast"}}
_KEPT: _Options = {
    "--residuals": {
        "type": _residuals,
        "help": "what is kept for the backward pass: auto, recompute, or a share such as 0.5",
    }
}
_DEVICE: _Options = {
    "--device": {
        "action": "append",
        "type": _device,
        "metavar": "NAME",
        "help": "explain it for another device, such as h100, v5e or mi300x, and say what it takes "
        "there; several times for devices beside each other, all for all that are known",
    }
}
_OVERFLOW = "run it in float32, and find what a float16 could not hold"
_IGNORE: _Options = {
    "--ignore": {
        "action": "append",
        "choices": tuple(KINDS),
        "default": [],
        "metavar": "KIND",
        "help": f"leave out a kind of risk, may be given several times: {', '.join(KINDS)}",
    }
}
_COMPILED: _Options = {
    "function": {
        "metavar": "FILE|MODULE:FUNCTION",
        "help": "a file of an XLA dump, or with --args a function, in mixed precision if an option "
        "says so",
    },
    "--args": {**_TARGET, "help": _ARGS},
    "--gradient": _ONE_CALL["--gradient"],
    "--device": {
        "metavar": "NAME",
        "help": "compile for a device that is not there, such as v5e:2x2 or h100",
    },
    "--require": {
        "type": _required,
        "metavar": "DTYPE=PERCENT",
        "help": "exit with 1 where less of the FLOPs of products run in a dtype",
    },
    "--html": {**_FILE, "help": "write a page as well"},
}
# For each command what it does, and its options.
_COMMANDS: dict[str, tuple[str, _Options]] = {
    "explain": (
        "which equation runs in which dtype, and why; nothing is computed",
        _POLICY
        | _ONE_CALL
        | {"--html": {**_FILE, "help": "write a page as well"}}
        | _KEPT
        | _DEVICE,
    ),
    "stats": (
        "how often each primitive runs in each dtype; nothing is computed",
        _POLICY | _ONE_CALL | _AS_IS,
    ),
    "check": (
        "run the function, and find what makes an infinity or NaN",
        _POLICY | _ONE_CALL | {"--overflow": {**_FLAG, "help": _OVERFLOW}} | _AS_IS,
    ),
    "audit": (
        "list what is risky in a function written in 16 bits by hand; nothing is computed",
        _ONE_CALL | _IGNORE,
    ),
    "compiled": (
        "what the compiler made of a function, or of a dump; nothing runs",
        _POLICY | _COMPILED,
    ),
}

_DESCRIPTION, _EPILOG = (__doc__ or "\n\n").split("\n\n", 1)

_HELP: dict[str, Any] = {
    "epilog": _EPILOG,
    "formatter_class": argparse.RawDescriptionHelpFormatter,
}


def _version() -> str:
    # The package's own, and not the metadata's: a checkout has none, or that of another install.
    return importlib.import_module(__name__.partition(".")[0]).__version__


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = argparse.ArgumentParser(prog="jmp-autocast", description=_DESCRIPTION, **_HELP)
    top.add_argument("--version", action="version", version=f"jmp-autocast {_version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, options) in _COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(name, help=text, description=description, **_HELP)
        for option, settings in (_COMMON | options).items():
            command.add_argument(option, **settings)
    return top
