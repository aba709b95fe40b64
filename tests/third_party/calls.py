"""A part of each program in a call changes nothing: ``python -m tests.third_party.calls``.

For each program, and for each way to wrap a part, a random segment of it: the property `calls` of
the fuzzer (`tests/fuzz/properties.py`), without its evaluation op by op, which takes minutes for
loops of hundreds of steps. Prints what has other dtypes than inline.
"""

import argparse
import sys
import zlib

import jax
import numpy as np

from jmp_autocast import BF16, FP16, Policy
from tests.fuzz.properties import Flat, avals
from tests.fuzz.segments import (
    WRAPPERS,
    computed_in,
    difference,
    draw_segment,
    inline,
    without_dead,
)

from .program import Draw
from .tables import PROGRAMS

POLICIES = {"bfloat16": BF16, "float16": FP16, "compute": Policy("bfloat16", level="compute")}


def found_in(name, policy, seed=0):
    """Yields what has other dtypes, once for each way to wrap a part."""
    fn, args = PROGRAMS[name].build(Draw(name))
    leaves, tree = jax.tree.flatten(args)
    count = len(jax.tree.leaves(args[0]))
    closed = jax.make_jaxpr(lambda *xs: fn(*jax.tree.unflatten(tree, xs)))(*leaves)
    is_param = [k < count for k in range(len(leaves))]
    flat = Flat(without_dead(closed), leaves, is_param, {"policy": POLICIES[policy]})
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    for wrapper, wrap in WRAPPERS.items():
        segment = draw_segment(flat.closed, rng)
        if segment is None:
            continue
        forms = [segment.program(segment.call(w)) for w in (inline, wrap)]
        if len({tuple(avals(flat.plain(form))) for form in forms}) > 1:
            continue  # other weak types
        lines = [computed_in(flat.cast(form).jaxpr) for form in forms]
        if text := difference(*lines):
            yield f"{name}, {policy}: {segment.start} to {segment.stop - 1} in {wrapper}\n{text}"


def main(arguments=None):
    parser = argparse.ArgumentParser("python -m tests.third_party.calls", None, __doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="what the name of a program holds")
    options = parser.parse_args(arguments)
    differing = 0
    with jax.numpy_dtype_promotion("standard"):
        for name in sorted(PROGRAMS):
            for policy in POLICIES if options.only in name else ():
                for text in found_in(name, policy, options.seed):
                    differing += 1
                    print(text, flush=True)
    print(f"{differing} parts with other dtypes")
    return differing


if __name__ == "__main__":
    sys.exit(main() > 0)
