"""Wrong uses of `tune`."""

import jax
import jax.numpy as jnp

from jmp_autocast import autocast, tune
from jmp_autocast.inspect.tuning.search_log import LogError
from jmp_autocast.inspect.tuning.tune import UnreachableError

from .row import Row, X, loss, loss_at_call

PARAMS = {"w": X}
BATCHES = [(PARAMS, X)]


def count(x):
    return jnp.sum(x > 0)


class Random:
    """A function that gives something else at each call."""

    __name__ = "random"

    def __init__(self):
        self.calls = 0

    def __call__(self, params, x):
        self.calls += 1
        return self.calls + x @ params["w"]


ROWS = [
    Row(
        "tune",
        "an array for the function",
        lambda w: tune(X, [(X,)], tolerance=0.1),
        TypeError,
        "tune | of type ndarray | takes a callable | Pass the function itself",
    ),
    Row(
        "tune",
        "a function that is wrapped",
        lambda w: tune(autocast(loss_at_call), BATCHES, tolerance=0.1),
        ValueError,
        (
            r"tune | autocast\(<function loss_at_call | already wrapped | "
            "Pass the function that was wrapped"
        ),
    ),
    Row(
        "tune",
        "no goal",
        lambda w: tune(loss, BATCHES),
        ValueError,
        "tolerance and accept | neither | exactly one | Write tolerance=0.01",
    ),
    Row(
        "tune",
        "two goals",
        lambda w: tune(loss, BATCHES, tolerance=0.1, accept=bool),
        ValueError,
        "tolerance and accept | both | exactly one | Write tolerance=0.01",
    ),
    Row(
        "tune",
        "a negative tolerance",
        lambda w: tune(loss, BATCHES, tolerance=-1),
        ValueError,
        "tolerance | got -1 | positive number | tolerance=0.01",
    ),
    Row(
        "tune",
        "a tolerance that is NaN",
        lambda w: tune(loss, BATCHES, tolerance=float("nan")),
        ValueError,
        "tolerance | got nan | positive number | tolerance=0.01",
    ),
    Row(
        "tune",
        "a string as tolerance",
        lambda w: tune(loss, BATCHES, tolerance="0.1"),
        TypeError,
        "tolerance | '0.1' of type str | must be a number | tolerance=0.01",
    ),
    Row(
        "tune",
        "a number to accept",
        lambda w: tune(loss, BATCHES, accept=0.1),
        TypeError,
        "accept | 0.1 of type float | must be a function | tolerance=",
    ),
    Row(
        "tune",
        "accept without a return",
        lambda w: tune(loss, BATCHES, accept=lambda mixed: None, progress=False),
        TypeError,
        "accept | None of type NoneType | must return a bool | Return True",
    ),
    Row(
        "tune",
        "accept that returns an array",
        lambda w: tune(loss, BATCHES, accept=lambda mixed: X > 0, progress=False),
        TypeError,
        "accept | of type ndarray | must return a bool | Return True",
    ),
    Row(
        "tune",
        "one batch for several",
        lambda w: tune(loss, (PARAMS, X), tolerance=0.1),
        TypeError,
        r"batches\[0\] | of type dict | must be a tuple | \[\(params, x\)\]",
    ),
    Row(
        "tune",
        "an array for batches",
        lambda w: tune(loss, X, tolerance=0.1),
        TypeError,
        r"batches | of type ndarray | an iterable of tuples | \[\(params, x\)\]",
    ),
    Row(
        "tune",
        "no batches",
        lambda w: tune(loss, [], tolerance=0.1),
        ValueError,
        r"batches | none | at least one | \[\(params, x\)\]",
    ),
    Row(
        "tune",
        "a shape in a batch",
        lambda w: tune(loss, [(PARAMS, jax.ShapeDtypeStruct((2, 2), jnp.float32))], tolerance=0.1),
        TypeError,
        r"batches\[0\] | ShapeDtypeStruct | must hold arrays | pass values",
    ),
    Row(
        "tune",
        "argnums out of range",
        lambda w: tune(loss, BATCHES, tolerance=0.1, argnums=2),
        ValueError,
        "argnums=2 | have 2 | positional arguments | argnums=0",
    ),
    Row(
        "tune",
        "a name for argnums",
        lambda w: tune(loss, BATCHES, tolerance=0.1, argnums="params"),
        TypeError,
        "argnums | 'params' | position of an argument | argnums=0",
    ),
    Row(
        "tune",
        "a policy's name",
        lambda w: tune(loss, BATCHES, tolerance=0.1, policy="o1"),
        ValueError,
        "policy | 'o1' | must be a compute dtype | 'bfloat16'",
    ),
    Row(
        "tune",
        "a number for the log",
        lambda w: tune(loss, BATCHES, tolerance=0.1, log=3, progress=False),
        TypeError,
        "log | 3 of type int | must be a path | 'tune.jsonl'",
    ),
    Row(
        "tune",
        "a log that is none",
        lambda w: tune(loss, BATCHES, tolerance=0.1, log=__file__, progress=False),
        LogError,
        "log | tune_rows.py | not a log of tune | Pass the path",
    ),
    Row(
        "tune",
        "a number for progress",
        lambda w: tune(loss, BATCHES, tolerance=0.1, progress=1),
        TypeError,
        "progress | got 1 | True, False or None | Leave it out",
    ),
    Row(
        "tune",
        "nothing to compare",
        lambda w: tune(count, [(X,)], tolerance=0.1, progress=False),
        ValueError,
        "tolerance=0.1 | count returns none | float arrays | pass accept",
    ),
    Row(
        "tune",
        "a tolerance out of reach",
        lambda w: tune(Random(), BATCHES, tolerance=1e-9, progress=False),
        UnreachableError,
        "tolerance=1e-09 | the error is still | out of reach | Raise the tolerance",
    ),
]
