"""A search that kills its own process after some trials: ``LOG TRIALS``."""

import os
import signal
import sys

import jax
import jax.numpy as jnp

from jmp_autocast import tune

BLOCKS = 20
CULPRITS = (3, 11, 17)


def model(x):
    """Overflows a float16 in some blocks; magnitudes elsewhere are as large, without harm."""
    for i in range(BLOCKS):
        big = 600.0 if i in CULPRITS else 100.0
        with jax.named_scope(f"block_{i}"):
            x = jnp.sqrt(jnp.square((x @ jnp.eye(2)) * big)) * (1.0 / big)
    return x


BATCHES = [(jnp.full((2, 2), 0.9),)]


class Accept:
    """Says whether the result is finite, and stops the process after some trials."""

    def __init__(self, limit=None):
        self.calls = 0
        self._limit = limit

    def __call__(self, mixed):
        if self.calls == self._limit:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        return jnp.isfinite(mixed(*BATCHES[0])).all()


def run(log, limit=None):
    """Returns the policy, the report, and how many trials this call has run itself."""
    accept = Accept(limit)
    policy, report = tune(model, BATCHES, accept=accept, log=log, progress=False, report=True)
    return policy, report, accept.calls


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
