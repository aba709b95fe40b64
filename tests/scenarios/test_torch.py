"""What PyTorch's autocast tests demand, and what a rewrite of single equations gets wrong easily.

A test names the test of PyTorch (``test/test_autocast.py``, ``test_cuda.py``) that it restates, by
its number in their order. The others stand elsewhere:

* 1 to 7, 12, 13, single operations, norms and softmax: `conformance`; 6,
  ``test_autocast_banned``: ``plan/test_near_one.py``.
* 8, spellings: ``policies/test_policies.py``; 15 to 18, errors, and what they leave behind:
  `bad_input`.
* 10, ``test_autocast_rnn``: cells of Haiku and Linen in `third_party`.
* 21 and 24 to 29, uses of a weight and its one cast: ``derivatives/test_source_views.py``; 28, in
  regions of two dtypes: ``loops/test_structural.py``.
* 31 to 33: ``derivatives/test_custom_rules.py``, ``policies/test_scopes.py``,
  ``policies/test_rules.py``; 34, what a checkpoint computes again: a property of the fuzzer.
* 36 to 66, graph rewriting: `transform`, and nesting (45) in ``loops/test_structural.py``.
* A bias that would widen each layer: ``plan/test_votes.py``.

11, 19 and 22 have no counterpart in a function transform. A jaxpr holds the parts of
``layer_norm``, ``softmax`` and ``linear``, which PyTorch's op lists name.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import nn

from jmp_autocast import BF16, Policy, autocast, full_precision
from tests.support.jaxprs import equations, find, through_a_dot, trace
from tests.support.torch_ops import (
    arrays,
    cast,
    computed,
    normal,
    result_dtype,
)


def test_nothing_accumulates_over_calls():
    """test_autocast_cache_leak (check 23): the memo of casts ends with its trace."""
    weights = {"w": normal(8, 8), "frozen": normal(8, 8, seed=1)}
    fn = autocast(lambda p, x: x @ p["w"] @ p["frozen"].T @ p["w"].T, "bfloat16")
    x = normal(2, 8)
    sizes = [len(list(equations(trace(fn, weights, x)))) for _ in range(3)]
    assert len(set(sizes)) == 1
    reference = weakref.ref(weights["frozen"])
    fn(weights, x)
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(2):
        fn(weights, x)
    gc.collect()
    assert len(jax.live_arrays()) == before
    weights.clear()
    gc.collect()
    assert reference() is None


# --- beyond the dtype of one op, whose rows are in `conformance` --------------------------------

V = (4,)

# PyTorch casts a fresh copy for `pow(x, 2)` and `square`; here they are float32 where their result
# is (a sum, a norm, a mean) or where they are returned, and an activation squared on its way to a
# matmul stays low.
SQUARES = {
    "square": (jnp.square, "float32"),
    "pow_2": (lambda a: a**2, "float32"),
    "mul": (lambda a: a * a, "bfloat16"),
}


@pytest.mark.parametrize(("square", "returned"), SQUARES.values(), ids=SQUARES)
def test_a_square_is_float32_where_it_is_summed(square, returned):
    for read, expected in (
        (jnp.sum, "float32"),
        (through_a_dot, "bfloat16"),
        (lambda a: a, returned),
    ):
        fn = lambda a, read=read: read(square(through_a_dot(a)))
        (eqn,) = find(trace(computed(fn), *arrays((V,))), "square", "integer_pow", "mul")
        assert eqn.outvars[0].aval.dtype == expected
    (x,) = cast(arrays((V,)), "bfloat16")
    assert result_dtype(computed(square), x) == "bfloat16"  # declared so


def full_precision_of(fn):
    def in_scope(a):
        with full_precision():
            return fn(a)

    return in_scope


def test_rounded_on_return_by_default_rules_alone():
    """A rule of the user's, and the most careful level, say float32 themselves."""
    (x,) = arrays((V,))
    fn = lambda a: jnp.arctan(through_a_dot(a))
    for policy in (BF16.with_rules({"atan": "FP32"}), Policy(jnp.bfloat16, level="tensor_cores")):
        assert result_dtype(autocast(fn, policy=policy, output_dtype="computed"), x) == "float32"
    scoped = lambda a: full_precision_of(jnp.arctan)(through_a_dot(a))
    assert result_dtype(computed(scoped), x) == "float32"
    own = lambda elu: lambda a: elu(through_a_dot(a))
    elu = jax.jit(lambda a: jnp.where(a > 0, a, jnp.expm1(a)))
    assert result_dtype(computed(own(elu)), x) == "float32"
    assert result_dtype(computed(own(nn.elu)), x) == "bfloat16"
