"""Runs a function on each batch of arguments of `tune`, and measures the errors of its results."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...autocast import Autocast, kind_of, opened
from ...backend import EVERY_ROUNDING
from ...call.arguments import check_function, flatten
from ...interpreters.compat import fresh_make_jaxpr, mark_frames, trace_context
from ...interpreters.primitives.evaluate import as_function, of_positions
from ...policies.errors import wrong_type
from ..calls import differentiated
from ..measure.devices import readable
from ..measure.error_probe import ArrayError, distance
from ..signature import Signature, split

mark_frames(__file__)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of one call, their static signature, and their array leaves."""

    args: tuple[Any, ...]
    signature: Signature
    arrays: list[Any]

    @property
    def kind(self) -> tuple[Any, ...]:
        """The signature and the types of the arrays: batches of one kind have equal plans."""
        return self.signature, *map(jax.typeof, self.arrays)


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fn``, traced only once for arguments of equal types.

    `tune` runs the same program under many policies: later calls bind the equations of the first
    trace, with their scopes and source lines. Callables that are no plain functions are returned as
    they are.
    """
    if not inspect.isfunction(fn):
        return fn
    known: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    # The `autocast` wrappers of all trials live in the `__dict__` of this function, and are freed
    # with it.
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        signature, arrays = split(args)
        # A call with stateful objects or with a static argument without a hash is not cached: a
        # jaxpr would lose writes into the objects, and the argument may change between calls.
        if kind_of(fn, args, {}) is not Autocast or not signature.is_constant:
            return fn(*args)
        key = (signature, *map(jax.typeof, arrays), trace_context())
        if key not in known:
            flat = flatten(fn, (), args, {})
            known[key] = as_function(fresh_make_jaxpr(flat.traceable, *arrays)), flat.unflatten
        run, unflatten = known[key]
        return unflatten(run(*arrays))

    return call


def arrays_of(fn: Callable[..., Any], argnums: Any) -> Callable[..., list[Any]]:
    """Returns ``fn`` as a function from a signature and its arrays to arrays.

    With ``argnums``, the results are followed by the gradients of the first result.
    """

    def run(signature: Signature, *arrays: Any) -> list[Any]:
        args = signature.rebuilt(arrays)
        # State that the call writes is discarded.
        with opened(fn, args, {}) as pure:
            call = flatten(pure.fn, (), pure.args, pure.kwargs)
            if argnums is None:
                return call.traceable(*call.arrays)
            wrt = differentiated(argnums, len(args), call.paths, call.arrays, pure.untrained)

            def loss(chosen: list[Any]) -> tuple[Any, list[Any]]:
                outputs = of_positions(call.traceable, call.arrays, wrt)(*chosen)
                return outputs[0], outputs

            chosen = [call.arrays[i] for i in wrt]
            (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(chosen)
            return [*outputs, *gradients]

    return run


def outputs_of(fn: Callable[..., Any], batches: Sequence[Batch], argnums: Any) -> list[list[Any]]:
    """Returns the float results of a function for each batch, with gradients as in `arrays_of`."""
    # The function is compiled, as users run it, but XLA must not remove a rounding: this would
    # hide a value that overflows on a device that computes in 16 bits.
    run = jax.jit(arrays_of(fn, argnums), static_argnums=0, compiler_options=EVERY_ROUNDING)
    results = [run(batch.signature, *batch.arrays) for batch in batches]
    return [[x for x in each if jnp.issubdtype(x.dtype, jnp.inexact)] for each in results]


def nudged(batch: Batch) -> Batch:
    """Returns a batch whose floats are moved by about a unit in the last place, up or down.

    The difference between the float32 results for ``batch`` and for the returned batch is the
    uncertainty of float32.
    """
    rng = np.random.default_rng(0)

    def moved(x: Any) -> Any:
        aval = jax.typeof(x)
        # A value that is no array, such as a hijax variable of Flax, has no dtype.
        if getattr(aval, "dtype", None) not in (jnp.float32, jnp.float64):
            return x
        eps = float(jnp.finfo(aval.dtype).eps)
        if aval.weak_type:
            return x * (1 + eps)  # keeps the weak type, which a product with an array would lose
        near = (1 + eps * rng.choice((-1, 1), aval.shape)).astype(aval.dtype)
        y = readable(x)
        return x * near if y is x else jax.device_put(y * near, x.sharding)

    return dataclasses.replace(batch, arrays=[moved(x) for x in batch.arrays])


@jax.jit
def distances(exact: Sequence[Any], found: Sequence[Any]) -> list[ArrayError]:
    """Returns the error of each array of a program against that of the float32 program."""
    return [distance(x, y) for x, y in zip(exact, found, strict=True) if x.size]


def worst(distances: Sequence[ArrayError], undetermined: Sequence[bool]) -> float:
    """Returns the largest relative L2 error, infinity if an array is no longer finite.

    The largest error counts, not the mean, in which an exact loss would hide a lost gradient. An
    array that float32 does not determine (``undetermined``) only has to be finite.
    """
    pairs = zip(distances, undetermined, strict=True)
    return max(
        (float(d.error) for d, left_out in pairs if not left_out or float(d.lost) > 0), default=0.0
    )


def check(fn: Any, tolerance: Any) -> None:
    """Raises TypeError or ValueError for a wrong function or tolerance."""
    check_function(fn, "tune", "Pass the function itself, then its arguments.")
    if isinstance(fn, Autocast):
        raise ValueError(
            f"tune got {fn!r}, which autocast has already wrapped, and tries policies itself. Pass "
            "the function that was wrapped, and its policy as policy=."
        )
    fix = "Write the largest relative error, such as tolerance=0.01."
    # True is an int, and would mean a tolerance of 100 %.
    if not isinstance(tolerance, int | float | np.number) or isinstance(tolerance, bool):
        raise wrong_type("tolerance must be a number", tolerance, fix)
    if not 0 < float(tolerance) < math.inf:
        raise ValueError(f"tolerance must be a positive number, got {tolerance}. {fix}")
