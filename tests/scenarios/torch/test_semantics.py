"""What PyTorch's autocast tests demand of regions, errors, the cast cache and custom functions.

Each test names the test of PyTorch (``test/test_autocast.py``, ``test_cuda.py``) that it restates.
Those that have no counterpart in a function transform:

11. ``test_autocast_rnn`` on the CPU: a mix of dtypes that fails without autocast fails when the
    function is traced; autocast makes no ill-typed program well-typed.
19. ``test_*_autocast_deprecated_warning``: nothing is deprecated yet.
22. ``test_cache_disabled``: the memo of casts cannot be switched off; it lives in one trace.
6. ``test_autocast_banned`` is among the scenarios of compilers (67); 15 to 17 are in `bad_input`.
10. ``test_autocast_rnn`` on CUDA is ``test_rnn``.
24 to 27. Uses with and without gradients, and 29, 513 uses of a weight with gradient 2.0, are in
    ``derivatives/test_source_views.py``; 31 is in ``derivatives/test_custom_rules.py``.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jmp_autocast import (
    CastPolicy,
    autocast,
    compute_precision,
    full_precision,
    register_policy,
)
from tests.support.jaxprs import (
    assert_dots_run_in,
    casts,
    dot_dtypes,
    equations,
    find,
    through_a_dot,
    trace,
)
from tests.support.torch_ops import DTYPES, computed, normal


def casts_of_arguments(jaxpr, dtype):
    """The casts of the program's own arguments to a 16-bit dtype, by argument."""
    arguments = list(jaxpr.jaxpr.invars)
    found = [eqn.invars[0] for eqn in casts(jaxpr, "float32", dtype)]
    return [sum(v is argument for v in found) for argument in arguments]


# --- the API ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_spellings_agree(dtype):
    """test_generic_autocast (check 8)."""
    fn = lambda x: x @ x
    spellings = [
        autocast(fn, compute_dtype=dtype),
        autocast(compute_dtype=dtype)(fn),
        autocast(fn, compute_dtype=jnp.dtype(dtype)),
        autocast(fn, policy=dtype),
        autocast(fn, policy=f"params=float32,compute={dtype}"),
    ]
    assert len(set(spellings)) == 1
    assert len({str(trace(f, normal(2, 2))) for f in spellings}) == 1


def test_default_dtype():
    """test_autocast_fast_dtype (check 9)."""
    assert_dots_run_in("float16", trace(autocast(jnp.matmul), normal(2, 2), normal(2, 2)))
    assert autocast(jnp.matmul) == autocast(jnp.matmul, compute_dtype=jnp.float16)


def test_an_exception_leaves_nothing_behind():
    """_run_autocast_outofplace's flag checks (18), and #195488 for a compiled region (67)."""
    x, plain = normal(2, 2), lambda x: x @ x

    def fails(x):
        with full_precision():
            raise RuntimeError("in the region")

    for wrapped in (autocast(fails), jax.jit(autocast(fails)), autocast(jax.jit(fails))):
        with pytest.raises(RuntimeError, match="in the region"):
            wrapped(x)
        assert dot_dtypes(trace(plain, x)) == [("float32",) * 3]
        assert_dots_run_in("float16", trace(autocast(plain), x))


def test_recursion():
    """A decorated function that calls itself; in PyTorch autocast stays on afterwards (20)."""

    @autocast(compute_dtype="bfloat16")
    def power(x, n):
        return x if n == 0 else x @ power(x, n - 1)

    x = normal(2, 2)
    jaxpr = trace(lambda x: power(x, 3), x)  # a Python int is static
    assert dot_dtypes(jaxpr) == [("bfloat16",) * 3] * 3
    assert dot_dtypes(trace(lambda x: x @ x, x)) == [("float32",) * 3]


# --- one cast per parameter -------------------------------------------------------------------


@jax.custom_vjp
def custom_linear(x, w):
    return x @ w


custom_linear.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda residuals, g: (g @ residuals[1].T, residuals[0].T @ g),
)


def test_a_weight_is_cast_once_in_forward_and_custom_backward():
    """test_cast_cache_is_global (check 21)."""
    loss = lambda p, x: jnp.sum(custom_linear(x, p["w"]) ** 2)
    p, x = {"w": normal(4, 3)}, normal(2, 4, seed=1)
    jaxpr = trace(jax.grad(autocast(loss, compute_dtype="bfloat16"), argnums=(0, 1)), p, x)
    assert_dots_run_in("bfloat16", jaxpr)
    sizes = [eqn.invars[0].aval.size for eqn in casts(jaxpr, "float32", "bfloat16")]
    assert sizes.count(p["w"].size) == 1


def test_nothing_accumulates_over_calls():
    """test_autocast_cache_leak (check 23): the memo of casts ends with its trace."""
    weights = {"w": normal(8, 8), "frozen": normal(8, 8, seed=1)}
    fn = autocast(lambda p, x: x @ p["w"] @ p["frozen"].T @ p["w"].T, compute_dtype="bfloat16")
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


def layer(w, x):
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("inner", [compute_precision("float16"), None], ids=["scope", "autocast"])
def test_one_parameter_in_regions_of_both_dtypes(inner):
    """A float16 region in a bfloat16 one: an error in PyTorch, whose cache is keyed without the
    dtype (28)."""

    def fn(p, x):
        y = x @ p["w"]
        if inner is None:
            y = autocast(jnp.matmul, compute_dtype="float16")(y, p["w"])
        else:
            with inner:
                y = y @ p["w"]
        return y @ p["w"]

    p, x = {"w": normal(3, 3)}, normal(2, 3, seed=1)
    jaxpr = trace(autocast(fn, compute_dtype="bfloat16"), p, x)
    assert [operands[:2] for operands in dot_dtypes(jaxpr)] == [
        ("bfloat16",) * 2,
        ("float16",) * 2,
        ("bfloat16",) * 2,
    ]
    assert casts_of_arguments(jaxpr, "bfloat16")[0] == 1
    grad_of = lambda f: jax.grad(lambda p: f(p, x).sum())(p)["w"]
    grads, want = grad_of(autocast(fn, compute_dtype="bfloat16")), grad_of(fn)
    np.testing.assert_allclose(grads, want, atol=0.02 * float(jnp.abs(want).max()))


def test_an_updated_parameter_is_cast_again():
    """After an in-place update PyTorch's cache gives the old cast; here a new value is new (30)."""

    def fn(p, x):
        y = x @ p["w"]
        return y @ (p["w"] + 1.0)

    p, x = {"w": jnp.eye(2)}, jnp.ones((1, 2))
    jaxpr = trace(computed(fn), p, x)
    assert len(casts(jaxpr, "float32", "bfloat16")) == 3  # x, w and w + 1
    np.testing.assert_array_equal(np.asarray(computed(fn)(p, x), np.float32), [[3.0, 3.0]])


# --- custom functions and checkpoint ----------------------------------------------------------


def test_a_function_that_declares_float32():
    """test_autocast_custom_cast_inputs (check 32): low inputs arrive in float32, nothing inside is
    rewritten, and the cotangent of a low input is low."""

    @jax.custom_vjp
    def declared(x, rest):
        with full_precision():
            return x @ rest["w"]

    def backward(residuals, g):
        x, rest = residuals
        with full_precision():
            return g @ rest["w"].T, {"w": x.T @ g}

    declared.defvjp(lambda x, rest: (declared(x, rest), (x, rest)), backward)
    x, w = normal(3, 3), normal(3, 3, seed=1)
    fn = computed(lambda x, w: declared(through_a_dot(x), {"w": through_a_dot(w)}))
    inner = lambda jaxpr: [d for d in dot_dtypes(jaxpr) if d != ("bfloat16",) * 3]
    assert inner(trace(fn, x, w)) == [("float32",) * 3]
    pull = lambda x, w: jax.vjp(fn, x, w)[1](jnp.ones((3, 3)))
    assert inner(trace(pull, x, w)) == [("float32",) * 3] * 3
    assert fn(x, w).dtype == jnp.float32
    plain = trace(declared, x, {"w": w})
    assert dot_dtypes(plain) == [("float32",) * 3]


def new_primitive(name):
    """A primitive ``scale(x, y) = x * y`` of another package."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, y: x * y)
    primitive.def_abstract_eval(lambda x, y: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x, y: x * y, multiple_results=False))
    return primitive


@pytest.mark.parametrize("low", [False, True], ids=["full_operands", "low_operands"])
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (CastPolicy.FP32, "float32"),
        (CastPolicy.LOWER_PRECISION_FP, "bfloat16"),
        (CastPolicy.KEEP, "float32"),
        (CastPolicy.PROMOTE, None),
        (None, "float32"),
    ],
    ids=["fp32", "low", "keep", "promote", "unregistered"],
)
def test_a_registered_operation(policy, dtype, low):
    """test_custom_op / register_autocast, also of a dict of arrays, #181127 (check 33)."""
    primitive = new_primitive(f"scale_{policy}_{low}")
    if policy is not None:
        register_policy(primitive, policy)
    enter = through_a_dot if low else lambda x: x
    fn = computed(lambda d: primitive.bind(enter(d["x"]), enter(d["y"])), params=None)
    d = {"x": normal(4), "y": normal(4, seed=1)}
    (eqn,) = find(trace(fn, d), primitive.name)
    want = dtype or ("bfloat16" if low else "float32")
    assert {v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)} == {want}
    np.testing.assert_allclose(np.asarray(fn(d), np.float32), d["x"] * d["y"], atol=0.05)


@pytest.mark.parametrize(
    ("every_layer", "dtype"), [(False, "bfloat16"), (True, "float16")], ids=["whole", "layers"]
)
def test_checkpoint(every_layer, dtype):
    """test_autocast_checkpointing (check 34): the recomputation is the forward pass."""
    weights = [normal(3, 3, seed=k) for k in range(3)]

    def sequential(wrap):
        def fn(weights, x):
            for w in weights:
                x = wrap(layer)(w, x)
            return jnp.sum(x)

        return fn if every_layer else lambda weights, x: wrap(fn)(weights, x)

    x = normal(2, 3, seed=9)
    ours = jax.grad(autocast(sequential(jax.checkpoint), compute_dtype=dtype))
    plain = jax.grad(autocast(sequential(lambda f: f), compute_dtype=dtype))
    jaxpr = trace(ours, weights, x)
    assert_dots_run_in(dtype, jaxpr)
    uncast = trace(jax.grad(sequential(jax.checkpoint)), weights, x)
    assert (
        len(dot_dtypes(jaxpr))
        == len(dot_dtypes(uncast))
        > len(dot_dtypes(trace(plain, weights, x)))
    )
    # XLA may leave out the rounding between two fused operations, but not across a barrier.
    exact = {"xla_allow_excess_precision": False}
    found, expected = (jax.jit(f).lower(weights, x).compile(exact) for f in (ours, plain))
    for a, b in zip(found(weights, x), expected(weights, x), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(a, b)
