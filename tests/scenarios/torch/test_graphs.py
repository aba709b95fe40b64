"""PyTorch's tests of autocast as a graph rewrite and under its compiler, restated for jaxprs.

From ``test/test_jit_autocast.py``, ``test/dynamo/test_ctx_manager.py`` and the functorch tests;
``test_torch_compiled`` holds the second half, and each test names those that it restates.
``autocast_float64`` (61), which PyTorch accepts on CUDA, is an error here and among the invalid
options of ``test_torch_semantics``; a failing region (67) is there too.
"""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax, nn

from jmp_autocast import autocast, compute_precision, full_precision
from tests.support.jaxprs import assert_dots_run_in, casts, dot_dtypes, equations, find, trace
from tests.support.torch_ops import DTYPES, computed, normal, out_dtypes

BF16, F16, F32 = (("bfloat16",) * 3, ("float16",) * 3, ("float32",) * 3)


A, B, C = (normal(3, 3, seed=k) for k in range(3))


def off(fn):
    return autocast(fn, enabled=False)


def product(a, b):
    return a @ b


# --- which dtypes -----------------------------------------------------------------------------


def test_product_and_sum():
    """test_minimal, test_linear_bf16 (35)."""
    fn = computed(lambda a, b: ((c := a @ b), c.sum()))
    assert out_dtypes(fn, A, B) == ["bfloat16", "float32"]


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


def test_duplicate_inputs():
    """test_duplicate_inputs (38): one cast for both operands."""
    jaxpr = trace(computed(lambda a: (a @ a, a @ a.T)), A)
    assert dot_dtypes(jaxpr) == [BF16] * 2
    assert len(casts(jaxpr, "float32", "bfloat16")) == 1


FLOAT64 = {
    "fp32": jnp.power,
    "promote": lambda a, b: jnp.arctan2(a, b) + a * b,
    "fp32_set_opt_dtype": lambda a, b: nn.softmax(a) + jnp.sum(b),
    "low": product,
    "mixed": lambda a, b: a @ b + jnp.exp(b),
}


@pytest.mark.parametrize("fn", FLOAT64.values(), ids=FLOAT64)
def test_float64_is_not_narrowed(fn):
    """test_fp32_policy_with_fp64, promote_policy_fp64, fp32_set_opt_dtype_policy_fp64 (39)."""
    with jax.enable_x64(True):
        a, b = A.astype(jnp.float64), B.astype(jnp.float64)
        jaxpr = trace(computed(fn), a, b)
        floats = {v.aval.dtype.name for eqn in equations(jaxpr) for v in eqn.outvars}
        assert floats - {"bool", "int64"} == {"float64"}


def test_promote_policy():
    """test_promote_policy (40): a product, then addcmul with float32."""
    fn = computed(lambda a, b, c: ((d := a @ b), c + d * d))
    assert out_dtypes(fn, A, B, C) == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("dtype", "want"), [(None, "float32"), ("bfloat16", "bfloat16"), ("float64", "float64")]
)
def test_softmax_with_a_dtype(dtype, want):
    """test_fp32_set_opt_dtype_policy (41), test_jit_autocast_softmax (56)."""

    def fn(a, b):
        out = nn.softmax(a @ b)
        return out if dtype is None else out.astype(dtype)

    with jax.enable_x64(dtype == "float64"):
        assert out_dtypes(computed(fn), A, B) == [want]


def test_updates():
    """test_inplace (51): an update is out of place, and follows the promote rule."""
    low = lambda a, b: (a @ b).at[0].set(a[0] @ b)
    assert out_dtypes(computed(low), A, B) == ["bfloat16"]
    full = lambda a, b: a.at[0].set(a[0] @ b)
    assert out_dtypes(computed(full), A, B) == ["float32"]
    accumulated = lambda a, b: a.at[0].add(a[0] @ b)
    assert out_dtypes(computed(accumulated), A, B) == ["float32"]


# --- control flow and nesting -----------------------------------------------------------------


def test_cond():
    """test_control_flow (42), broken in PyTorch: a product in each branch."""

    def fn(p, a, b):
        c = lax.cond(p, lambda: a @ b, lambda: (a @ b) @ b)
        return c, c @ a

    assert out_dtypes(computed(fn), True, A, B) == ["bfloat16"] * 2
    assert dot_dtypes(trace(computed(fn), True, A, B)) == [BF16] * 4


@pytest.mark.parametrize("low_first", [True, False])
def test_divergent_branches(low_first):
    """test_divergent_types (43): the branches disagree, so both return float32."""
    branches = [lambda a, b: a @ b, lambda a, b: jnp.exp(a @ b)]
    fn = lambda p, a, b: lax.cond(p, *branches[:: 1 if low_first else -1], a, b)
    (cond,) = find(trace(computed(fn), jnp.bool_(True), A, B), "cond")
    for branch in cond.params["branches"]:
        assert [aval.dtype for aval in branch.out_avals] == [jnp.float32]
    loss = lambda f: jax.jit(jax.grad(lambda a, p: jnp.sum(f(p, a, B))))
    ours, plain = loss(computed(fn)), loss(fn)
    for p in (jnp.bool_(True), jnp.bool_(False)):
        np.testing.assert_allclose(ours(A, p), plain(A, p), atol=0.05)


@pytest.mark.parametrize("enabled", [(True, False), (False, True)], ids=str)
def test_divergent_autocast(enabled):
    """test_divergent_autocast, conditional_autocast (44): on in one branch, off in the other."""
    branches = [autocast(product, compute_dtype="float16", enabled=on) for on in enabled]
    fn = lambda p, a, b: lax.cond(p, *branches, a, b)
    jaxpr = trace(fn, jnp.bool_(True), A, B)
    assert sorted(dot_dtypes(jaxpr)) == [F16, F32]
    assert out_dtypes(fn, jnp.bool_(True), A, B) == ["float32"]
    outer = autocast(fn, compute_dtype="bfloat16")
    assert sorted(dot_dtypes(trace(outer, jnp.bool_(True), A, B))) == [F16, F32]


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


@pytest.mark.parametrize("inner", ["plain", "on", "off"])
def test_callees(inner):
    """test_callees, callees_with_autocast_on, callees_with_autocast_off (46)."""
    wrap = {
        "plain": lambda f: f,
        "on": lambda f: autocast(f, compute_dtype="float16"),
        "off": off,
    }
    callee = jax.jit(lambda a, b: jax.jit(wrap[inner](product))(a, b) @ b)
    jaxpr = trace(autocast(lambda a, b: callee(a, b) @ a, compute_dtype="bfloat16"), A, B)
    assert dot_dtypes(jaxpr) == [{"plain": BF16, "on": F16, "off": F32}[inner], BF16, BF16]


ORDERS = {
    "ac": lambda f, dtype: autocast(f, compute_dtype=dtype),
    "jit_ac": lambda f, dtype: jax.jit(autocast(f, compute_dtype=dtype)),
    "ac_jit": lambda f, dtype: autocast(jax.jit(f), compute_dtype=dtype),
    "jit_ac_jit": lambda f, dtype: jax.jit(autocast(jax.jit(f), compute_dtype=dtype)),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_orders_of_jit(order):
    """test_eager_and_script, script_and_tracing, autocast_decorator(_outside_jit), and the same
    jitted function under bf16, f16 and off, in turn (47, 50, 60, 65)."""
    jitted = jax.jit(lambda a, b: jnp.tanh(a @ b))
    for _ in range(2):
        for dtype in DTYPES:
            fn = order(jitted, dtype)
            assert_dots_run_in(dtype, trace(fn, A, B))
            assert out_dtypes(fn, A, B) == ["float32"]
            error = np.abs(jax.jit(fn)(A, B) - jitted(A, B)).max()
            eps = float(jnp.finfo(dtype).eps)
            assert eps / 64 < error < 2 * eps
        assert_dots_run_in("float32", trace(jitted, A, B))


def test_enabled_is_static():
    """test_runtime_autocast_state(_expr) (48)."""
    with pytest.raises(TypeError, match="enabled must be known when the program is traced"):
        jax.jit(lambda on, a: autocast(product, enabled=on)(a, a))(True, A)


def test_arguments_binding():
    """test_autocast_arguments_binding, test_autocast_decorator (64)."""
    with pytest.raises(TypeError, match="positional"):
        autocast(product, jnp.bfloat16)

    @jax.jit
    def compiled(a, b):
        @autocast(compute_dtype="bfloat16", output_dtype="computed")
        def inner(a, *, b):
            return a @ b

        return inner(a, b=b)

    assert compiled(A, B).dtype == jnp.bfloat16


# --- modules, casts and constants -------------------------------------------------------------


def modules():
    dense = linen.Dense(4)
    params = dense.init(jax.random.key(0), A)
    yield "linen", dense.apply, (params, A)
    linear = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    yield "equinox", lambda layer, x: jax.vmap(layer)(x), (linear, A)
    graph, state = nnx.split(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    yield "nnx", lambda state, x: nnx.merge(graph, state)(x), (state, A)


@pytest.mark.parametrize(("fn", "args"), [pytest.param(*m[1:], id=m[0]) for m in modules()])
def test_modules(fn, args):
    """test_script_module (49): a class that holds weights and a bias returns 16 bits."""
    assert out_dtypes(computed(fn), *args) == ["bfloat16"]
    assert_dots_run_in("bfloat16", trace(computed(fn), *args))


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


@pytest.mark.parametrize("output_dtype", ["same", "computed"])
def test_twice_is_once(output_dtype):
    """test_jit_freeze_autocast_basic (54)."""
    fn = lambda p, x: nn.softmax(jnp.tanh(x @ p["w"] + p["b"]) @ p["w"])
    p = {"w": A, "b": A[0]}
    once = autocast(fn, compute_dtype="bfloat16", output_dtype=output_dtype)
    twice = autocast(once, compute_dtype="bfloat16", output_dtype=output_dtype)
    names = lambda f: [eqn.primitive.name for eqn in equations(trace(f, p, B))]
    assert names(twice) == names(once)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_constants_are_cast_at_trace_time(make):
    """test_jit_freeze_autocast_constants (55)."""
    w = make(B)
    jaxpr = trace(computed(lambda a: (a @ w) @ w.T), A)
    assert dot_dtypes(jaxpr) == [BF16] * 2
    assert [eqn.invars[0] for eqn in casts(jaxpr, "float32", "bfloat16")] == jaxpr.jaxpr.invars
