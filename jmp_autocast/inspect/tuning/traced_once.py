"""The user's function, traced once for all the trials that `tune` makes of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from ...autocast import Autocast, kind_of
from ...call.arguments import flatten
from ...interpreters.compat import fresh_make_jaxpr, mark_frames, trace_context
from ...interpreters.primitives.evaluate import as_function
from ..signature import split

mark_frames(__file__)


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs the user's once for arguments of equal types.

    A trial asks what a policy makes of the program, and the program is the same in all of them.
    Later calls bind the equations of the first trace, with their scopes and source lines.

    Args:
        fn: The user's function. Without a ``__dict__`` of a plain function it is returned itself.
    """
    if not inspect.isfunction(fn):
        return fn
    known: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    # The wrappers of all policies that are tried live in the ``__dict__`` of this function, as
    # `autocast` keeps them, and go when it goes; in that of the user's function they would stay.
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        signature, arrays = split(args)
        # A function of objects that hold state writes into them, which no jaxpr says. A static
        # argument without a hash may have changed.
        if kind_of(fn, args, {}) is not Autocast or not signature.is_constant:
            return fn(*args)
        key = (signature, *map(jax.typeof, arrays), trace_context())
        if key not in known:
            flat = flatten(fn, (), args, {})
            known[key] = as_function(fresh_make_jaxpr(flat.traceable, *arrays)), flat.unflatten
        run, unflatten = known[key]
        return unflatten(run(*arrays))

    return call
