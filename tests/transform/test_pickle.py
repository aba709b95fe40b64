"""Policies and wrapped functions are pickled, copied, and sent to a fresh process of 64 bits.

Fork is no case of its own: JAX warns at every fork that its threads may deadlock in the child, and
this library holds nothing that a fork would split.
"""

import concurrent.futures
import copy
import multiprocessing
import pickle
import re

import cloudpickle
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, FP16, CastPolicy, Decision, Policy, autocast
from jmp_autocast.integrations import nnx as nnx_integration
from tests.support import pickled_functions
from tests.support.jaxprs import assert_dots_run_in, trace
from tests.support.pickled_functions import (
    Layer,
    decorated,
    decorated_nnx,
    double,
    emit_double,
    is_weight,
    small_stays_full,
)

X = np.ones((8, 8), np.float32)
RULED = BF16.with_rules({"dot_general": small_stays_full, "tanh": CastPolicy.FP32})


def pickled(x):
    return pickle.loads(pickle.dumps(x))


def cloudpickled(x):
    return cloudpickle.loads(cloudpickle.dumps(x))


THROUGH = [pickled, cloudpickled, copy.copy, copy.deepcopy]

VALUES = {
    "FP16": FP16,
    "rules": RULED,
    "scopes": BF16.with_rules({"*": "float32"}, scope="*/ln"),
    "fields": Policy("bfloat16", "float32", "compute", matmul="float8"),
    "emission": BF16.with_rules({"tanh": emit_double}),
    "decision": Decision(policy=CastPolicy.FP32, output_dtype="bfloat16"),
    "member": CastPolicy.FP32_SET_OPT_DTYPE,
}


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("name", VALUES)
def test_policies(name, through):
    value = VALUES[name]
    if isinstance(value, Policy):
        value.rule_for("dot_general")  # what it caches does no harm
    again = through(value)
    assert again == value
    assert hash(again) == hash(value)
    assert repr(again) == repr(value)


WRAPPERS = {
    "function": autocast(double),
    "options": autocast(double, policy=RULED, params=is_weight, output_dtype="computed"),
    "output_dtype": autocast(double, output_dtype="bfloat16"),
    "disabled": autocast(double, enabled=False),
    "decorated": decorated,
    "static_method": Layer.square,
    "method": Layer.apply,
    "nnx": nnx_integration.autocast(double, policy="compute=bfloat16,output=float32"),
    "nnx_decorated": decorated_nnx,
}


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_of_a_function_of_a_module_comes_back_itself(name, through):
    """So that what JAX has traced and compiled for it is found again."""
    assert through(WRAPPERS[name]) is WRAPPERS[name]


@pytest.mark.parametrize("through", THROUGH)
def test_a_wrapper_of_a_wrapper(through):
    twice = autocast(autocast(double), "bfloat16")
    assert through(twice) == twice
    assert hash(through(twice)) == hash(twice)


@pytest.mark.parametrize("through", [cloudpickled, copy.deepcopy])
def test_a_wrapper_of_a_lambda(through):
    weights = np.full((8, 8), 0.5, np.float32)
    fn = autocast(lambda x: x @ weights, jnp.bfloat16, params=0)
    again = through(fn)
    assert_dots_run_in("bfloat16", trace(again, X))
    np.testing.assert_array_equal(again(X), fn(X))
    shown = [re.sub("0x[0-9a-f]+", "", repr(wrapper)) for wrapper in (again, fn)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("through", THROUGH)
def test_bound_methods_and_callable_objects(through):
    for fn in (Layer(5.0).apply, autocast(Scaled(5.0))):
        again = through(fn)
        assert_dots_run_in("bfloat16", trace(again, X))
        np.testing.assert_array_equal(again(X), fn(X))


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return self.scale * (x @ x)


@pytest.mark.process
def test_a_spawned_process_of_64_bits(monkeypatch):
    """`jax_enable_x64` from the start; wrappers arrive there by name, with their options."""
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        x64, dots, same_types = pool.submit(
            pickled_functions.report,
            decorated,
            autocast(double),
            autocast(double, policy=FP16.with_rules({"dot_general": small_stays_full})),
            Layer.square,
        ).result(timeout=120)
    half = [("bfloat16",) * 3]
    by_rule = [("float16",) * 3]  # 8 x 8 x 8 products: not small
    mixed = half + 2 * [("float64",) * 3]
    assert x64
    assert dots == [half, half, by_rule, half, mixed, [("float64",) * 3]]
    assert same_types
