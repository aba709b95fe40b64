"""The share of FLOPs in 16 bits of each program: ``python -m tests.third_party.shares``.

Prints the programs whose share differs by more than 0.1 % from that in ``shares.json``; with
``--record`` it writes that file. Nothing is compiled.
"""

import argparse
import json
import pathlib
import sys

import jax

from jmp_autocast import BF16, explain

from .program import Draw
from .tables import PROGRAMS

RECORDED = pathlib.Path(__file__).with_name("shares.json")


def share_of(name):
    """The share of the FLOPs of matmuls and convolutions that are in bfloat16."""
    with jax.numpy_dtype_promotion("standard"):
        fn, args = PROGRAMS[name].build(Draw(name))
        return explain(fn, *args, policy=BF16).totals.low_share


def main(arguments=None):
    parser = argparse.ArgumentParser("python -m tests.third_party.shares", None, __doc__)
    parser.add_argument("--record", action="store_true")
    shares = {name: round(share_of(name), 4) for name in sorted(PROGRAMS)}
    if parser.parse_args(arguments).record:
        RECORDED.write_text(json.dumps(shares, indent=1) + "\n")
        return 0
    before = json.loads(RECORDED.read_text())
    other = [n for n in sorted({*shares, *before}) if differ(shares.get(n), before.get(n))]
    for name in other:
        print(f"{name}: {before.get(name)} -> {shares.get(name)}")
    return len(other)


def differ(one, other):
    return None in (one, other) or abs(one - other) > 1e-3


if __name__ == "__main__":
    sys.exit(main() > 0)
