"""What the commands do: each returns the exit code."""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax

from ..autocast import Autocast, autocast
from ..inspect import audit, check_numerics, explain, explain_compiled, op_stats, tune
from ..inspect.compiled.hlo import UnreadableError
from ..inspect.export import json_text, saved
from ..inspect.tuning.search_log import LogError
from ..inspect.tuning.tune import UnreachableError
from ..keep_less import keep_less
from .targets import UsageError, arguments_of, batches_of, function_of, load, written


def run_explain(options: argparse.Namespace) -> int:
    """Prints the report of `explain`."""
    fn, policy = function_of(options)
    if options.residuals is not None:
        if options.gradient or isinstance(fn, Autocast):
            raise UsageError(
                "--residuals needs the loss itself: a gradient keeps nothing for another pass, and "
                "a function that autocast has wrapped has its own. Leave out --gradient, or name "
                "the function that was wrapped"
            )
        fn, policy = keep_less(autocast(fn, policy=policy), residuals=options.residuals), None
    args, kwargs = arguments_of(options)
    device = options.device and ("all" if "all" in options.device else options.device)
    target = jax.grad(fn) if options.gradient else fn
    report = explain(target, *args, policy=policy, device=device, **kwargs)
    print(report)
    written(options.html, report.to_html)
    written(options.json, report.to_json)
    return 0


def run_stats(options: argparse.Namespace) -> int:
    """Prints what `op_stats` counts."""
    fn = _in_mixed_precision(options)
    args, kwargs = arguments_of(options)
    counts = op_stats(fn, *args, **kwargs)
    print(counts)
    written(options.json, lambda path: saved(json_text(counts), path))
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Prints the report of `check_numerics`."""
    # The float32 program shows what float16 could not hold. In the mixed one it is infinite
    # already.
    options.as_is = options.as_is or options.overflow
    fn = _in_mixed_precision(options)
    args, kwargs = arguments_of(options)
    # `explain` and `stats` compute nothing and take shapes; here values are looked at.
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((args, kwargs))):
        raise UsageError(
            f"--args {options.args} returns a jax.ShapeDtypeStruct, and check runs the function. "
            "Return arrays, or use explain or stats, which compute nothing"
        )
    mode = "overflow" if options.overflow else "collect"
    _, report = check_numerics(fn, mode=mode)(*args, **kwargs)
    print(report)
    written(options.json, report.to_json)
    return 0 if report.first is None else 1


def run_compiled(options: argparse.Namespace) -> int:
    """Prints the report of `explain_compiled`."""
    program, args, kwargs = _compiled(options)
    try:
        report = explain_compiled(program, *args, device=options.device, **kwargs)
    except UnreadableError as error:
        raise UsageError(str(error)) from None
    print(report)
    written(options.html, report.to_html)
    written(options.json, report.to_json)
    if options.require is None:
        return 0
    dtype, least = options.require
    share, unknown = 100 * report.share(dtype), report.unknown_products
    enough = share >= least and not unknown and bool(report.products)
    print(
        f"{share:.1f} % of the FLOPs of products in {dtype}, {least:g} % required"
        + (f"; {unknown} products of unknown FLOPs" if unknown else "")
        + ("" if report.products else "; there is no product")
    )
    return 0 if enough else 1


def _compiled(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns what is explained: a file, or a function with its arguments."""
    path = pathlib.Path(options.function)
    if options.args is None:
        if not path.exists():
            raise UsageError(
                f"{options.function} is no file. Name a file of an XLA dump, or a function with "
                "--args MODULE:FUNCTION"
            )
        return path, (), {}
    fn, policy = function_of(options)
    args, kwargs = arguments_of(options)
    if policy is not None:
        fn = autocast(fn, policy=policy)
    return jax.grad(fn) if options.gradient else fn, args, kwargs


def run_audit(options: argparse.Namespace) -> int:
    """Prints the report of `audit`."""
    fn = load(options.function, "the function")
    args, kwargs = arguments_of(options)
    target = jax.grad(fn) if options.gradient else fn
    report = audit(target, *args, ignore=options.ignore, **kwargs)
    print(report)
    written(options.json, report.to_json)
    return 0 if report.is_clean else 1


def run_tune(options: argparse.Namespace) -> int:
    """Prints and saves what `tune` finds."""
    fn, start = function_of(options)
    if isinstance(fn, Autocast):
        raise UsageError(
            f"{options.function} is wrapped by autocast, and tune tries policies itself. Name the "
            "function that was wrapped"
        )
    accept = options.accept and load(options.accept, "--accept")
    if options.batches is not None:
        batches = batches_of(options)
    else:
        args, kwargs = arguments_of(options)
        batches = [args]
        if kwargs:
            fn = functools.wraps(fn)(lambda *args, fn=fn: fn(*args, **kwargs))
    # Before the search, not after it: a search may take hours.
    for path in (options.output, options.json):
        if path is not None and not os.access(path.parent, os.W_OK):
            raise UsageError(f"cannot write {path}: {path.parent} is not a writable folder")
    try:
        policy, report = tune(
            fn,
            batches=batches,
            tolerance=options.tolerance,
            accept=accept,
            policy=start,
            argnums=0 if options.gradient else None,
            log=options.log,
            report=True,
        )
    except UnreachableError as error:
        print(f"jmp-autocast: {error}", file=sys.stderr)
        return 1
    except LogError as error:
        raise UsageError(str(error)) from None
    written(options.output, policy.save)
    written(options.json, report.to_json)
    return 0


def _in_mixed_precision(options: argparse.Namespace) -> Callable[..., Any]:
    """Returns the function as it is asked for: in mixed precision, or its gradient."""
    fn, policy = function_of(options)
    if options.as_is and policy is not None:
        raise UsageError(
            "--as-is and --overflow take no policy. Leave out --policy, --compute-dtype and "
            "--level, or --as-is and --overflow"
        )
    if not options.as_is and not isinstance(fn, Autocast):
        fn = autocast(fn, policy=policy)
    return jax.grad(fn) if options.gradient else fn


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "explain": run_explain,
    "stats": run_stats,
    "check": run_check,
    "audit": run_audit,
    "compiled": run_compiled,
    "tune": run_tune,
}
