"""Eight threads that trace at once, each with options of its own, do not affect each other."""

import threading

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import (
    BF16,
    FP16,
    CastPolicy,
    Policy,
    autocast,
    full_precision,
)
from tests.support.jaxprs import trace
from tests.support.threads import at_once

W = np.random.default_rng(0).standard_normal((8, 8), np.float32) / 3


def in_full_precision(x):
    with full_precision():
        return x @ W


def in_a_named_scope(x):
    with jax.named_scope("inner"):
        return x @ W


def with_an_inner_autocast(x):
    return autocast(lambda x: x @ W, jnp.bfloat16)(x)


# What a thread traces: the options, and the part of the function that differs.
JOBS = {
    "float16": ({"policy": FP16}, in_a_named_scope),
    "bfloat16": ({"policy": BF16}, in_a_named_scope),
    "rules": ({"policy": FP16.with_rules({"tanh": CastPolicy.FP32})}, in_a_named_scope),
    "full_precision": ({"policy": FP16}, in_full_precision),
    "inner": ({"policy": Policy(jnp.float16, level="compute")}, with_an_inner_autocast),
    "disabled": ({"enabled": False}, in_a_named_scope),
}


def program(job, meet):
    """The gradient's jaxpr; ``meet`` is called between the equations."""
    options, part = JOBS[job]

    def fn(x):
        meet()
        x = jnp.tanh(x @ W)
        meet()
        x = part(x)
        meet()
        return jnp.sum(jnp.tanh(x) @ W)

    return str(trace(jax.value_and_grad(autocast(fn, **options)), W))


def test_threads_that_trace_at_once():
    with jax.check_tracer_leaks(False):
        expected = {job: program(job, lambda: None) for job in JOBS}
    assert len(set(expected.values())) == len(JOBS)
    barrier = threading.Barrier(len(JOBS), timeout=120)
    found = at_once(
        {job: lambda job=job: [program(job, barrier.wait) for _ in range(3)] for job in JOBS}
    )
    assert found == {job: [text] * 3 for job, text in expected.items()}
