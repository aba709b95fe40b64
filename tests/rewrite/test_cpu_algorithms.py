"""Dot algorithms on CPUs: products of parts, or a warning; other platforms get what JAX emits."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.fast_products import products_in
from jmp_autocast import BF16, autocast, cpu_kernels, full_precision
from tests.support.exact_products import error, exact_einsum

PRESETS = lax.DotAlgorithmPreset
X3 = PRESETS.BF16_BF16_F32_X3
# The relative error at a width of 512, and the products that each product becomes.
ALGORITHMS = {
    "bf16_bf16_f32": (4e-3, 1),
    "bf16_bf16_f32_x3": (8e-6, 3),
    "bf16_bf16_f32_x6": (4e-7, 6),
    "bf16_bf16_f32_x9": (4e-7, 9),
}
OURS = lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32, 1, 1, 3, False)
HAS_KERNELS = cpu_kernels.cpu_kernels().wide


@pytest.fixture
def with_features(monkeypatch):
    """Pretends that the CPU has some features and XLA a kernel."""

    def pretend(*features):
        monkeypatch.setattr(cpu_kernels, "cpu_features", lambda: frozenset(features))
        monkeypatch.setattr(cpu_kernels, "_has_kernel", lambda dtype: True)
        cpu_kernels._kernels_with.cache_clear()

    yield pretend
    cpu_kernels._kernels_with.cache_clear()


def operands():
    rng = np.random.default_rng(0)
    shapes = (32, 512), (512, 48)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def by_policy(word):
    fn = lambda a, b: a @ b
    policy = BF16.with_rules({"*": "float32"}).with_rules({"*": word})
    return autocast(fn, policy=policy)


def by_program(word):
    return autocast(functools.partial(jnp.matmul, precision=PRESETS[word.upper()]), policy=BF16)


def warned():
    """Where the CPU has no kernels, the product runs in float32 and says so."""
    return contextlib.nullcontext() if HAS_KERNELS else pytest.warns(match="no faster")


@pytest.mark.parametrize("asked", [by_policy, by_program])
@pytest.mark.parametrize("word", ALGORITHMS)
def test_an_algorithm_has_its_digits_and_its_products_in_both_directions(word, asked):
    (bound, count), (a, b), fn = ALGORITHMS[word], operands(), asked(word)
    with warned():
        found, pullback = jax.vjp(jax.jit(fn), a, b)
    exact, gradients = exact_einsum("ab,bc->ac", a, b)
    g = jnp.asarray(np.random.default_rng(1).standard_normal(exact.shape), jnp.float32)
    with warned():
        compiled = jax.jit(pullback).lower(g).compile()
    assert error(found, exact) < bound
    for got, right in zip(compiled(g), gradients(np.asarray(g)), strict=True):
        assert error(got, right) < bound
    products = products_in(compiled.as_text())
    if HAS_KERNELS:
        assert len(products) == 2 * count
        assert all(p.operands == ("bfloat16", "bfloat16") and p.kernel for p in products)


@pytest.mark.parametrize(
    "fn",
    [
        jax.vmap(lambda a, b: jnp.dot(a, b, precision=X3), in_axes=(0, None)),
        jax.checkpoint(lambda a, b: jnp.dot(a, b, precision=X3)),
        lambda a, b: lax.map(lambda row: jnp.dot(row, b, precision=X3), a),
        lambda a, b: jnp.dot(b.T, a.T, precision=X3).T,
        jax.jit(lambda a, b: jnp.dot(a, b, precision=X3)),
        lambda a, b: jnp.dot(a, b, precision=OURS),
    ],
    ids=["vmap", "checkpoint", "map", "transposed", "jit", "DotAlgorithm"],
)
def test_what_stands_around_it(fn):
    a, b = operands()
    with warned():
        found = jax.jit(autocast(fn, policy=BF16))(a, b)
    off = error(found, exact_einsum("ab,bc->ac", a, b)[0])
    assert off < 8e-6
    if HAS_KERNELS:
        assert off > 1e-6  # and not float32


def test_a_scope_in_float32_keeps_the_algorithm_that_its_program_names():
    def fn(a, b):
        with full_precision():
            return jnp.dot(a, b, precision=X3)

    with warned():
        found = autocast(fn, policy=BF16)(*operands())
    assert error(found, exact_einsum("ab,bc->ac", *operands())[0]) < 8e-6


def test_infinities_and_outer_products_are_those_of_float32():
    fn = autocast(lambda a, b: jnp.dot(a, b, precision=X3), policy=BF16)
    a = jnp.array([[jnp.inf, 1.0], [1.0, 1.0]])
    with warned():
        np.testing.assert_array_equal(fn(a, jnp.ones((2, 2))), [[np.inf] * 2, [2.0] * 2])
    column, row = jnp.array([[1 + 2**-20]]), jnp.array([[1.0, 3.0]])
    np.testing.assert_array_equal(fn(column, row), column * row)


@pytest.mark.parametrize(
    ("precision", "features", "says"),
    [
        (PRESETS.TF32_TF32_F32, ["amx_bf16"], "TF32_TF32_F32 .* ask for 'bf16_bf16_f32_x3'"),
        (X3, [], "X3 .* this CPU has none of .* Leave the precision out"),
        (
            lax.DotAlgorithm(jnp.float16, jnp.float16, jnp.float32, 1, 1, 3, False),
            ["amx_bf16"],
            "XLA:CPU does not know it",
        ),
    ],
)
def test_what_no_cpu_knows_and_a_cpu_without_kernels_are_said(
    precision, features, says, with_features
):
    with_features(*features)
    fn = autocast(functools.partial(jnp.matmul, precision=precision), policy=BF16)
    with pytest.warns(UserWarning, match=says):
        found = jax.jit(fn)(*operands())
    assert error(found, exact_einsum("ab,bc->ac", *operands())[0]) < 1e-6


def test_several_devices_and_symbols_are_said():
    fn = autocast(lambda a, b: jnp.dot(a, b, precision=X3), policy=BF16)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    a, b = operands()
    with pytest.warns(UserWarning, match="several devices"):
        found = jax.jit(fn)(jax.device_put(a, split), b)
    assert error(found, exact_einsum("ab,bc->ac", a, b)[0]) < 1e-6
    (n,) = jax.export.symbolic_shape("n")
    with pytest.warns(UserWarning, match="symbols" if HAS_KERNELS else "none of|no kernel"):
        exported = jax.export.export(jax.jit(fn))(jax.ShapeDtypeStruct((n, 512), jnp.float32), b)
    assert error(exported.call(a, b), exact_einsum("ab,bc->ac", a, b)[0]) < 1e-6


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("precision", [X3, PRESETS.TF32_TF32_F32, PRESETS.F32_F32_F32])
def test_other_platforms_get_what_jax_emits(precision, platform):
    a, b = operands()

    def text(fn):
        both = jax.value_and_grad(lambda a, b: jnp.sum(fn(a, b)), (0, 1))
        lowered = jax.jit(both).trace(a, b).lower(lowering_platforms=(platform,))
        return re.sub(r"@jit_\S+|loc\(.*\)", "", lowered.as_text())

    plain = functools.partial(jnp.matmul, precision=precision)
    ours = text(autocast(plain, policy=BF16.with_rules({"*": "float32"})))
    assert "algorithm" in ours
    assert ours == text(plain)
