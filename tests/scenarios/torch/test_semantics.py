"""What PyTorch's autocast tests demand of regions, errors, the cast cache and custom functions.

Each test names the test of PyTorch (``test/test_autocast.py``, ``test_cuda.py``) that it restates.
Those that have no counterpart in a function transform:

11. ``test_autocast_rnn`` on the CPU: a mix of dtypes that fails without autocast fails when the
    function is traced; autocast makes no ill-typed program well-typed.
19. ``test_*_autocast_deprecated_warning``: nothing is deprecated yet.
22. ``test_cache_disabled``: the memo of casts cannot be switched off; it lives in one trace.
6. ``test_autocast_banned`` is among the scenarios of compilers (67); 15 to 17 are in `bad_input`.
10. ``test_autocast_rnn`` on CUDA is ``test_rnn``.
21. One cast for forward and backward pass, 24 to 27, uses with and without gradients, and 29, 513
    uses of a weight with gradient 2.0, are in ``derivatives/test_source_views.py``.
31. Custom functions are in ``derivatives/test_custom_rules.py``, 32, those that declare float32, in
    ``policies/test_scopes.py``, and 33, registered operations, in ``policies/test_rules.py``.
34. What a checkpoint computes again is a property of the fuzzer.

What PyTorch says of single operations (1 to 7, 12, 13) is in `conformance`; of graph rewriting (36
to 66) nesting and the gradients of compiled regions are here, and the rest is in `transform`.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import nn

from jmp_autocast import (
    BF16,
    autocast,
    compute_precision,
    full_precision,
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
from tests.support.torch_ops import DTYPES, arrays, cast, computed, normal, result_dtype


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


BF16_DOT, F16, F32 = (("bfloat16",) * 3, ("float16",) * 3, ("float32",) * 3)
A, B = (normal(3, 3, seed=k) for k in range(2))


def off(fn):
    return autocast(fn, enabled=False)


def product(a, b):
    return a @ b


# --- control flow and nesting -----------------------------------------------------------------


def test_nesting():
    """test_nested_autocast, implicitly_nested_autocast, reused_autocast(_expr) (45)."""
    half = autocast(product, compute_dtype="float16")

    def fn(a, b):
        x = half(a, b)  # on
        x = off(lambda x: half(x @ b, b) @ a)(x)  # off, on, off
        with full_precision():
            x = half(x @ a, b)  # off, on
        with compute_precision("float16"):
            x = off(product)(x @ b, a)  # on, off
        return half(x @ b, a)  # on, and the same transform once more

    want = [F16, F32, F16, F32, F32, F16, F16, F32, BF16_DOT, F16]
    assert dot_dtypes(trace(autocast(fn, compute_dtype="bfloat16"), A, B)) == want
    want = [F32 if dtypes == BF16_DOT else dtypes for dtypes in want]
    want[6] = F32  # outside autocast a scope does nothing
    assert dot_dtypes(trace(fn, A, B)) == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_compiled_regions(dtype):
    """backward_pass_autocast, #153044, #179804 (66): differentiating and compiling commute, also
    around a float32 region with a loss scale, whose own cotangents are too large for float16."""

    def loss(p, x):
        x = x @ p["w"]
        with full_precision():
            return jnp.sum(jnp.tanh(x @ p["w"]) ** 2 / 64.0) * (16384.0 * 64.0)

    ac = autocast(loss, compute_dtype=dtype)
    p = {"w": A}
    orders = [jax.grad(ac), jax.jit(jax.grad(ac)), jax.grad(jax.jit(ac))]
    first, *rest = [dot_dtypes(trace(f, p, B)) for f in orders]
    assert set(first) == {(dtype,) * 3, F32}
    assert all(dtypes == first for dtypes in rest)
    grads, *others = [jax.jit(f)(p, B)["w"] for f in orders]
    for other in others:
        np.testing.assert_array_equal(other, grads)
    want = jax.grad(loss)(p, B)["w"]
    np.testing.assert_allclose(grads, want, atol=0.02 * float(jnp.abs(want).max()))


# --- one cast per parameter -------------------------------------------------------------------


@jax.custom_vjp
def custom_linear(x, w):
    return x @ w


custom_linear.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda residuals, g: (g @ residuals[1].T, residuals[0].T @ g),
)


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


# --- beyond the dtype of one op, whose rows are in `conformance` -------------------------------

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
    for policy in (BF16.with_rules({"atan": "FP32"}), BF16.with_level("tensor_cores")):
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
