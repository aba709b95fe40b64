"""What the words of the command line name: functions, arguments, policies and files."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from ..autocast import Autocast
from ..call.arguments import name_of
from ..inspect.calls import calls_of
from ..policies import Policy
from ..policies.dtypes import DEFAULT
from ..policies.errors import did_you_mean


class UsageError(Exception):
    """A wrong use of the command line; its text is all that the user sees."""


def load(target: str, option: str) -> Callable[..., Any]:
    """Returns what ``package.module:name`` names.

    Args:
        target: The words.
        option: The option that they were given for.

    Raises:
        UsageError: There is no such module or name, or it is not callable.
    """
    module_name, colon, path = target.partition(":")
    if not (colon and module_name and path):
        raise UsageError(
            f"{option} must be MODULE:FUNCTION, such as package.module:function, got {target!r}"
        )
    try:
        found: Any = importlib.import_module(module_name)
    # Two errors have this type: the user's words are wrong, or the user's module is.
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise UsageError(
            f"{option} {target}: no module named {error.name!r}. Modules are looked for in the "
            "current directory and in the installed packages"
        ) from None
    except (TypeError, ValueError) as error:  # a relative name
        raise UsageError(f"{option} {target}: {module_name!r} names no module ({error})") from None
    for name in path.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, [n for n in dir(found) if not n.startswith("_")])
            raise UsageError(f"{option} {target}: {name_of(found)!r} has no {name!r}.{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(
            f"{option} {target} must be callable, got a value of type {type(found).__name__}"
        )
    return found


def arguments_of(options: argparse.Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments that ``--args`` makes.

    Raises:
        UsageError: It does not return a tuple.
    """
    made = load(options.args, "--args")()
    if not isinstance(made, tuple):
        raise UsageError(
            f"--args {options.args} must return a tuple of arguments, got a value of type "
            f"{type(made).__name__}. For one argument return (argument,)"
        )
    # Two tuples are two arguments. A tuple and a dict that could be keywords are what they look
    # like: for a dict as the second argument return (arguments, {}).
    keywords = made[-1] if len(made) == 2 and isinstance(made[0], tuple) else None
    if isinstance(keywords, dict) and all(isinstance(key, str) for key in keywords):
        return made
    return made, {}


def batches_of(options: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Returns the tuples of arguments that ``--batches`` makes.

    Raises:
        UsageError: It does not return an iterable of tuples.
    """
    made = load(options.batches, "--batches")()
    if isinstance(made, Iterator):
        made = list(made)  # what it raises is the user's
    try:
        return calls_of("tune", (), () if made is None else made)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--batches {options.batches}: {error}") from None


def function_of(options: argparse.Namespace) -> tuple[Callable[..., Any], Policy | None]:
    """Returns the function, and the policy that the options describe: None where they say nothing.

    Raises:
        UsageError: There is no such function, the file is no policy, an option contradicts it, or
            the function has a policy of its own.
    """
    fn, policy = load(options.function, "the function"), None
    if options.policy is not None:
        try:
            policy = Policy.load(options.policy)
        except OSError as error:
            raise UsageError(f"--policy {options.policy}: {error.strerror or error}") from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"--policy: {error}") from None
    dtype = options.compute_dtype
    if dtype is not None and policy is not None and policy.compute_dtype not in (dtype, DEFAULT):
        raise UsageError(
            f"--compute-dtype {dtype} contradicts {options.policy}, which says "
            f"{policy.compute_dtype}. Leave one of them out"
        )
    if dtype is not None:
        policy = dataclasses.replace(policy or Policy(), compute_dtype=dtype)
    if options.level is not None:
        policy = dataclasses.replace(policy or Policy(), level=options.level)
    if isinstance(fn, Autocast) and policy is not None:
        raise UsageError(
            f"{options.function} is wrapped by autocast and has its own policy. Leave out "
            "--policy, --compute-dtype and --level, or name the function that was wrapped"
        )
    return fn, policy


def written(path: pathlib.Path | None, write: Callable[[pathlib.Path], Any]) -> None:
    """Writes a file, if one is asked for, and says so.

    Raises:
        UsageError: It cannot be written.
    """
    if path is None:
        return
    try:
        write(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write {path}: {why}") from None
    print(f"wrote {path}")
