"""`tune`: planted culprits are found, and the policy that comes back keeps nothing else."""

import functools
import json
import math
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, CastPolicy, Policy, TuneReport, autocast, explain, tune
from jmp_autocast.inspect.search import run_bound
from jmp_autocast.inspect.tune import UnreachableError

from . import tune_worker
from .jaxprs import trace

FP32 = CastPolicy.FP32
X = jnp.full((2, 2), 0.9)
EYE = jnp.eye(2)

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def tuned(fn, batches, **options):
    return tune(fn, batches, progress=False, report=True, **options)


def pins(report):
    return [(pin.scope, pin.primitive) for pin in report.pinned]


# --- planted culprits among 2,000 equations ---------------------------------------------------


def blocks(culprits, large, count=400):
    """Five equations in each of many scopes; a square overflows a float16 in some of them."""

    def model(x):
        for i in range(count):
            big = 1000.0 if i in culprits else large
            with jax.named_scope(f"block_{i}"):
                x = jnp.sqrt(jnp.square((x @ EYE) * big)) * (1.0 / big)
        return x

    return model


def equations(model):
    return len(trace(model, X).eqns)


def test_planted_overflows_among_2000_equations():
    culprits = {20, 137, 201}
    model = blocks(culprits, large=100.0)
    assert equations(model) == 2000
    # Op by op: 30 programs of 2,000 equations would compile for minutes.
    with jax.disable_jit():
        policy, report = tuned(model, [(X,)], tolerance=0.05)
    assert pins(report) == [(f"block_{i}", "square") for i in sorted(culprits)]
    assert policy == keeping(FP16, pins(report))
    assert report.runs <= run_bound(len(culprits), report.units)
    print(len(culprits), report.units, report.runs)
    assert (report.error_before, report.share_after) == (math.inf, 1.0)
    assert report.error_after < 0.05
    assert {pin.why for pin in report.pinned} == {"range"}


def keeping(policy, pinned):
    for scope, primitive in pinned:
        policy = policy.with_rules({primitive: FP32}, scope=scope)
    return policy


def cancelling(culprits, count=250):
    """Eight equations in each of 250 scopes: adds and takes off what is large everywhere.

    In bfloat16 that loses all of the value where it is not a sum of powers of two.
    """

    def model(x):
        for i in range(count):
            with jax.named_scope(f"block_{i}"):
                h = x @ EYE
                shift = 3000.0 if i in culprits else 4096.0
                h = h + (shift if i in culprits else 0.0)
                h = h - (shift if i in culprits else 0.0)
                h = h * shift
                h = jnp.abs(h)
                h = h * (1.0 / shift)
                h = jnp.maximum(h, 0.25)
                x = jnp.minimum(h, 1.0)
        return x

    return model


@pytest.mark.parametrize("culprits", [{77}, {77, 248}, {3, 77, 248}], ids=len)
def test_planted_culprits_whose_values_are_like_all_others(culprits):
    model = cancelling(culprits)
    assert equations(model) == 2000
    with jax.disable_jit():
        policy, report = tuned(model, [(X,)], tolerance=0.05, policy=BF16)
    assert pins(report) == [(f"block_{i}", "add") for i in sorted(culprits)]
    assert policy == keeping(BF16, pins(report))
    assert report.runs <= run_bound(len(culprits), report.units)
    print(len(culprits), report.units, report.runs)
    assert {pin.why for pin in report.pinned} == {"search"}
