"""Wrong uses of `tune`."""

import jax
import jax.numpy as jnp

from jmp_autocast import autocast, tune
from jmp_autocast.inspect.tuning.search_log import LogError
from jmp_autocast.inspect.tuning.tune import UnreachableError

from .row import Row, X, loss, loss_at_call

PARAMS = {"w": X}
BATCHES = [(PARAMS, X)]
GOAL = "Write tolerance=0.01"
TUPLES = r"\[\(params, x1\)"


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


def _tune(mistake, error, parts, fn=loss, batches=BATCHES, **options):
    call = lambda w: tune(fn, batches=batches, progress=False, **options)
    return Row("tune", mistake, call, error, parts)


def _tolerance(mistake, error, parts, **options):
    return _tune(mistake, error, parts, **{"tolerance": 0.1} | options)


ROWS = [
    _tolerance(
        "an array for the function",
        TypeError,
        "tune | of type ndarray | takes a callable | Pass the function itself",
        fn=X,
    ),
    _tolerance(
        "a function that is wrapped",
        ValueError,
        r"tune | autocast\(<function loss_at_call | already wrapped | function that was wrapped",
        fn=autocast(loss_at_call),
    ),
    _tune("no goal", ValueError, f"tolerance and accept | neither | exactly one | {GOAL}"),
    _tolerance(
        "two goals",
        ValueError,
        f"tolerance and accept | both | exactly one | {GOAL}",
        accept=bool,
    ),
    _tolerance("negative", ValueError, "tolerance | -1 | positive number | =0.01", tolerance=-1),
    _tolerance(
        "a string as tolerance",
        TypeError,
        "tolerance | '0.1' of type str | must be a number | tolerance=0.01",
        tolerance="0.1",
    ),
    *(
        _tune(mistake, TypeError, f"accept | {value} | {rule}", accept=accept)
        for mistake, accept, value, rule in (
            ("a number", 0.1, "0.1 of type float", "must be a function | tolerance="),
            ("no return", lambda mixed: None, "None of", "must return a bool | Return True"),
            ("an array", lambda mixed: X > 0, "of type ndarray", "must return a bool | Return"),
        )
    ),
    *(
        _tolerance(mistake, error, f"{parts} | {TUPLES}", batches=batches)
        for mistake, batches, error, parts in (
            (
                "one batch for several",
                (PARAMS, X),
                TypeError,
                r"batches\[0\] | of type dict | must be a tuple",
            ),
            ("an array", X, TypeError, "batches | of type ndarray | an iterable of tuples"),
            ("no batches", [], ValueError, "batches | none | at least one"),
        )
    ),
    _tolerance(
        "a cost that is none",
        ValueError,
        "cost | 'times' | must be one of 'time', 'kept' | Did you mean 'time'",
        cost="times",
    ),
    _tolerance(
        "a device without rates",
        ValueError,
        "device | 'abacus' | must be a known device | rates",
        cost="time",
        device="abacus",
    ),
    Row(
        "tune",
        "arguments and batches",
        lambda w: tune(loss, w.params, X, batches=BATCHES, tolerance=0.1),
        ValueError,
        "batches | got 2 | arguments or batches | Write",
    ),
    Row(
        "tune",
        "a point that is none",
        lambda w: tune(jnp.matmul, X, X, tolerance=1, report=True, progress=False)[1].policy_at(3),
        ValueError,
        "kept=3 | no points | a point of the curve | Pass cost=",
    ),
    _tolerance(
        "a shape in a batch",
        TypeError,
        r"batches\[0\] | ShapeDtypeStruct | needs arrays | Pass arrays",
        batches=[(PARAMS, jax.ShapeDtypeStruct((2, 2), jnp.float32))],
    ),
    _tolerance(
        "a name for argnums",
        TypeError,
        "argnums | 'params' | position of an argument | argnums=0",
        argnums="params",
    ),
    _tolerance(
        "a policy's name",
        ValueError,
        "policy | 'o1' | must be a compute dtype | 'bfloat16'",
        policy="o1",
    ),
    _tolerance(
        "a number for the log",
        TypeError,
        "log | 3 of type int | must be a path | 'tune.jsonl'",
        log=3,
    ),
    _tolerance(
        "a log that is none",
        LogError,
        "log | tune_rows.py | not a log of tune | Pass the path",
        log=__file__,
    ),
    Row(
        "tune",
        "a number for progress",
        lambda w: tune(loss, batches=BATCHES, tolerance=0.1, progress=1),
        TypeError,
        "progress | got 1 | True, False or None | Leave it out",
    ),
    _tolerance(
        "nothing to compare",
        ValueError,
        "tolerance=0.1 | count returns none | float arrays | pass accept",
        fn=count,
        batches=[(X,)],
    ),
    _tolerance(
        "a tolerance out of reach",
        UnreachableError,
        "tolerance=1e-09 | the error is still | out of reach | Raise the tolerance",
        fn=Random(),
        tolerance=1e-9,
    ),
]
