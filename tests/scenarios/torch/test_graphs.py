"""PyTorch's tests of autocast as a graph rewrite and under its compiler, restated for jaxprs.

From ``test/test_jit_autocast.py``, ``test/dynamo/test_ctx_manager.py`` and the functorch tests;
each test names those that it restates. What they say of single operations is in `conformance`, of
wrong options (61) in `bad_input`, of compiling, exporting, batching and callbacks in `transform`; a
failing region (67) is in ``test_semantics``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import autocast, compute_precision, full_precision
from tests.support.jaxprs import casts, dot_dtypes, find, trace
from tests.support.torch_ops import DTYPES, computed, normal, out_dtypes

BF16, F16, F32 = (("bfloat16",) * 3, ("float16",) * 3, ("float32",) * 3)


A, B, C = (normal(3, 3, seed=k) for k in range(3))


def off(fn):
    return autocast(fn, enabled=False)


def product(a, b):
    return a @ b


# --- which dtypes -----------------------------------------------------------------------------


def test_disabled_region():
    """test_minimal_off (36), test_ignore_amp (57): also a function inside another autocast."""
    assert out_dtypes(computed(product, enabled=False), A, B) == ["float32"]
    fn = computed(lambda a, b: (off(product)(a, b), a @ b))
    assert out_dtypes(fn, A, B) == ["float32", "bfloat16"]
    assert dot_dtypes(trace(fn, A, B)) == [F32, BF16]


def test_explicit_casts():
    """test_explicit_casts (37): what the program casts to float64 stays there."""

    def fn(a, b, c):
        double = lambda x: x.astype(jnp.float64)
        return (double(a) @ double(b)).astype(jnp.float32), double(c) @ double(c), b @ c

    with jax.enable_x64(True):
        assert out_dtypes(computed(fn), A, B, C) == ["float32", "float64", "bfloat16"]
        assert dot_dtypes(trace(computed(fn), A, B, C)) == [("float64",) * 3] * 2 + [BF16]


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

    want = [F16, F32, F16, F32, F32, F16, F16, F32, BF16, F16]
    assert dot_dtypes(trace(autocast(fn, compute_dtype="bfloat16"), A, B)) == want
    want = [F32 if dtypes == BF16 else dtypes for dtypes in want]
    want[6] = F32  # outside autocast a scope does nothing
    assert dot_dtypes(trace(fn, A, B)) == want


def test_arguments_binding():
    """test_autocast_arguments_binding, test_autocast_decorator (64)."""
    with pytest.raises(TypeError, match=r"by keyword, got .* by position"):
        autocast(product, jnp.bfloat16)

    @jax.jit
    def compiled(a, b):
        @autocast(compute_dtype="bfloat16", output_dtype="computed")
        def inner(a, *, b):
            return a @ b

        return inner(a, b=b)

    assert compiled(A, B).dtype == jnp.bfloat16


# --- modules, casts and constants -------------------------------------------------------------


def test_casts_are_counted():
    """test_autocast_api, autocast_mixed_dtypes, jit_executor_under_autocast (52)."""
    both = lambda a, b: (
        autocast(product, compute_dtype="bfloat16")(a, b),
        autocast(product, compute_dtype="float16")(a, b),
    )
    jaxpr = trace(both, A, B)
    assert dot_dtypes(jaxpr) == [BF16, F16]
    for dtype in DTYPES:
        assert len(casts(jaxpr, "float32", dtype)) == 2
        assert len(casts(jaxpr, dtype, "float32")) == 1
    plain = trace(lambda a, b: (off(product)(a, b), autocast(jnp.exp)(a)), A, B)
    assert not find(plain, "convert_element_type")


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
