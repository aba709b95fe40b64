"""`autocast` of what is no plain function, its parameters, and which wrappers are equal."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from jmp_autocast import autocast, full_precision
from tests.support.jaxprs import assert_dots_run_in, dot_dtypes, trace

W = np.eye(3, dtype=np.float32)


class Model:
    """A class whose method is cast."""

    def __init__(self):
        self.w = W

    @autocast(compute_dtype=jnp.bfloat16)
    def apply(self, x):
        return x @ self.w


@dataclasses.dataclass
class Unhashable:
    """Compared by value, so without a hash."""

    scale: float

    def __call__(self, x):
        return self.scale * (x @ W)


def test_a_method_is_bound_to_its_object():
    assert_dots_run_in("bfloat16", trace(Model().apply, W))
    assert isinstance(Model.apply, type(autocast(len)))


def test_a_builtin_without_signature_takes_params():
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(dict)
    assert autocast(dict, params=0)({"a": W})["a"].dtype == jnp.float32


def test_a_callable_without_hash_is_told_apart_by_identity():
    first, second = Unhashable(2.0), Unhashable(2.0)
    with pytest.raises(TypeError, match="unhashable"):
        hash(first)
    assert hash(autocast(first)) == hash(autocast(first))
    assert hash(autocast(first)) != hash(autocast(second))
    assert_dots_run_in("float16", trace(jax.jit(autocast(first)), W))


def test_float32_says_what_disabled_says():
    fn = autocast(lambda x: x @ W, compute_dtype=jnp.float32, enabled=False)
    assert dot_dtypes(trace(fn, W)) == [("float32",) * 3]


def test_the_default_of_params_is_readable():
    assert repr(inspect.signature(autocast).parameters["params"].default) == "<auto>"


def test_an_unknown_primitive_in_full_precision_is_reported():
    primitive = Primitive("test_unknown_in_scope")
    primitive.def_abstract_eval(lambda x: x)

    def fn(x):
        with full_precision():
            return primitive.bind(x) @ W

    with pytest.warns(UserWarning, match="test_unknown_in_scope"):
        jaxpr = trace(autocast(fn, on_unknown="warn"), W)
    assert dot_dtypes(jaxpr) == [("float32",) * 3]


def biased(x, weights):
    return x @ weights["w"] + weights["b"]


# A bias that is data has a say, so that the sum is float32; a bias that is a parameter has none.
HOLDERS = {
    "no parameters": (None, "float32"),
    "argument 0": (0, "float32"),
    "argument 1": (1, "bfloat16"),
    "the last": (-1, "bfloat16"),
    "the last but one": (-2, "float32"),
    "all": ((0, -1), "bfloat16"),
    "a predicate": (lambda path: path == "1/b", "bfloat16"),
}


@pytest.mark.parametrize(("params", "dtype"), HOLDERS.values(), ids=HOLDERS)
def test_where_the_parameters_are(params, dtype):
    low = autocast(biased, compute_dtype=jnp.bfloat16, params=params, output_dtype="computed")
    assert low(W, {"w": W, "b": W[0]}).dtype == dtype


def test_a_container_in_front_holds_the_parameters():
    low = autocast(
        lambda weights, x: biased(x, weights), compute_dtype=jnp.bfloat16, output_dtype="computed"
    )
    assert low({"w": W, "b": W[0]}, W).dtype == jnp.bfloat16


def test_wrappers_of_other_options_are_not_equal():
    options = [
        {},
        {"compute_dtype": jnp.bfloat16},
        {"params": None},
        {"output_dtype": "computed"},
        {"enabled": False},
        {"on_unknown": "warn"},
    ]
    wrappers = [autocast(biased, **given) for given in options]
    for i, one in enumerate(wrappers):
        assert [one == other for other in wrappers] == [i == k for k in range(len(options))]
        assert one is autocast(biased, **options[i])
