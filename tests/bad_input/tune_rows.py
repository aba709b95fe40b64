"""Wrong uses of `tune`."""

import jax
import jax.numpy as jnp

from jmp_autocast import autocast, tune
from jmp_autocast.inspect.tuning.tune import UnreachableError

from .row import Row, X, loss, loss_at_call, rows

PARAMS = {"w": X}
BATCHES = [(PARAMS, X)]
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
    call = lambda w: tune(fn, batches=batches, **options)
    return Row("tune", mistake, call, error, parts)


def _tolerance(mistake, error, parts, **options):
    return _tune(mistake, error, parts, **{"tolerance": 0.1} | options)


ROWS = [
    *rows(
        ValueError,
        {
            "tune: arguments and batches": (
                lambda w: tune(loss, w.params, X, batches=BATCHES, tolerance=0.1),
                "batches | got 2 | arguments or batches | Write",
            ),
        },
    ),
    _tolerance(
        "a function that is wrapped",
        ValueError,
        r"tune | autocast\(<function loss_at_call | already wrapped | function that was wrapped",
        fn=autocast(loss_at_call),
    ),
    _tune("no goal", TypeError, r"tune | missing 1 required | 'tolerance' | Write tune\(fn"),
    _tolerance("negative", ValueError, "tolerance | -1 | positive number | =0.01", tolerance=-1),
    _tolerance(
        "a string as tolerance",
        TypeError,
        "tolerance | '0.1' of type str | must be a number | tolerance=0.01",
        tolerance="0.1",
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
            ("an array", X, TypeError, "batches | a tuple of arguments | of type ndarray"),
            ("no batches", [], ValueError, "batches | none | at least one"),
        )
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
        "nothing to compare",
        ValueError,
        "tolerance=0.1 | count returns none | float arrays | Return the arrays",
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
