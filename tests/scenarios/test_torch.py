"""What PyTorch's autocast tests demand, and what a rewrite of single equations gets wrong easily.

A test names the test of PyTorch (``test/test_autocast.py``, ``test_cuda.py``) that it restates, by
its number in their order. The others stand elsewhere:

* 1 to 7, 12, 13, single operations: `conformance`; 6, ``test_autocast_banned``: `test_autodiff`.
* 8, spellings: ``policies/test_policies.py``; 15 to 18, errors, and what they leave behind:
  `bad_input`.
* 10, ``test_autocast_rnn``: cells of Haiku, Linen and Equinox in `third_party`.
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

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from jmp_autocast import BF16, Policy, autocast, full_precision
from tests.support.jaxprs import equations, find, through_a_dot, trace
from tests.support.torch_ops import (
    DTYPES,
    arrays,
    cast,
    computed,
    normal,
    result_dtype,
    run_all,
)

LOWEST = np.finfo(np.float32).min


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
INDEX = np.array([1, 3])

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


def test_index_put_backward_of_computed_values():
    """Check 13 on float32 arguments whose values a dot computed: both ways in bfloat16."""
    put = lambda a, b: through_a_dot(a).at[INDEX].set(through_a_dot(b))
    fn = computed(put, "bfloat16")
    pull = lambda a, b: jax.vjp(fn, a, b)[1](jnp.ones((4,), jnp.bfloat16))
    jaxpr = trace(pull, *arrays((V, (2,))))
    assert [v.aval.dtype for v in jaxpr.jaxpr.outvars] == [jnp.float32] * 2
    moved = [v.aval.dtype for eqn in find(jaxpr, "scatter", "gather") for v in eqn.outvars]
    assert {dtype.name for dtype in moved if jnp.issubdtype(dtype, jnp.floating)} == {"bfloat16"}


# --- parts of what PyTorch has as one operation -------------------------------------------------


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean(jnp.square(x - mean), -1, keepdims=True) + 1e-5)


def fast_layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) - mean * mean + 1e-5)


def flax_layer_norm(x):
    return linen.LayerNorm(use_bias=False, use_scale=False).apply({}, x)


NORMS = [layer_norm, fast_layer_norm, flax_layer_norm]


@pytest.mark.parametrize("mean", [0.0, 100.0, 300.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_large_activations(dtype, mean):
    """Exactly the float32 norm of the 16-bit input. Squared in 16 bits, activations of mean 100
    give errors of 2.4 in bfloat16, and of mean 300 infinity in float16."""
    x = (np.random.default_rng(0).normal(size=(4, 64), scale=2.0) + mean).astype(np.float32)
    low = x.astype(jnp.dtype(dtype)).astype(np.float32)
    after = [computed(lambda x, f=f: f(through_a_dot(x)), dtype) for f in NORMS]
    ours = run_all(after, [(x,)] * len(NORMS))
    want = run_all(NORMS, [(low,)] * len(NORMS))
    for norm, got, true in zip(NORMS, ours, want, strict=True):
        assert got.dtype == np.float32, norm.__name__
        # Two float32 programs: compiled together, sums may be taken in another order.
        tolerance = 1e-5 * max(1.0, mean * mean * (norm in (fast_layer_norm, flax_layer_norm)))
        np.testing.assert_allclose(got, true, atol=tolerance, err_msg=norm.__name__)


@pytest.mark.parametrize("std", [3.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_low_logits(dtype, std):
    """The float32 softmax of the same logits; subtracted in 16 bits they cost 6 % to 30 %."""
    fns = {
        "softmax": nn.softmax,
        "log_softmax": nn.log_softmax,
        "logsumexp": lambda x: nn.logsumexp(x, -1),
        "scaled": lambda x: nn.softmax(x / 3.0),
        "masked": lambda x: nn.softmax(jnp.where(x > -1.0, x, LOWEST)),
        "biased": lambda x: nn.softmax(x + jnp.arange(100, dtype=jnp.float32) / 50),
    }
    x = np.random.default_rng(0).normal(size=(8, 100), scale=std).astype(np.float32)
    low = x.astype(jnp.dtype(dtype)).astype(np.float32)
    after = [computed(lambda x, f=f: f(through_a_dot(x)), dtype) for f in fns.values()]
    ours = run_all(after, [(x,)] * len(fns))
    want = run_all(list(fns.values()), [(low,)] * len(fns))
    for name, got, true in zip(fns, ours, want, strict=True):
        assert got.dtype == np.float32, name
        np.testing.assert_allclose(got, true, rtol=2e-5, atol=1e-12, err_msg=name)
