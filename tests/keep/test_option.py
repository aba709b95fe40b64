"""`keep_less(autocast(fn))`: what it does to 16-bit programs."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jmp_autocast import BF16, autocast, keep_less
from tests.support import nnx_models
from tests.support.jaxprs import dot_dtypes, find, trace
from tests.support.numerics import relative_error

from .programs import WEIGHTS, X, scanned, small, unrolled
from .test_segments import kept_nbytes

pytestmark = pytest.mark.usefixtures("jit_caches")


def test_nothing_changes_by_default():
    assert autocast(small) == keep_less(autocast(small), residuals="declared")
    assert autocast(small) != keep_less(autocast(small))
    mixed = autocast(unrolled)
    programs = [trace(jax.grad(f), WEIGHTS, X) for f in (mixed, keep_less(mixed))]
    assert str(programs[0]) == str(programs[1]), "without a loop, there is nothing to plan"


def test_less_is_kept_and_gradients_stay_as_near_to_float32():
    plain, planned = (
        keep_less(autocast(scanned, policy=BF16), residuals=r) for r in ("declared", "auto")
    )
    assert kept_nbytes(planned) < 0.6 * kept_nbytes(plain)
    exact, *found = (jax.jit(jax.grad(f))(WEIGHTS, X) for f in (scanned, plain, planned))
    for name, reference in exact.items():
        errors = [relative_error(g[name], reference) for g in found]
        assert found[1][name].dtype == jnp.float32
        # XLA:CPU keeps float32 inside its fusions, which others than these would not.
        assert errors[1] < 2 * errors[0]


def test_products_are_in_the_same_dtypes():
    plain, planned = (
        trace(jax.grad(keep_less(autocast(scanned, policy=BF16), residuals=r)), WEIGHTS, X)
        for r in ("declared", "auto")
    )
    assert find(planned, "remat2", "checkpoint")
    assert sorted(dot_dtypes(planned)) == sorted(dot_dtypes(plain))


def test_a_mixed_program_inside_another_function_keeps_as_little():
    mixed = autocast(scanned, jnp.bfloat16)
    around = keep_less(lambda weights, x: mixed(weights, x))
    assert kept_nbytes(keep_less(mixed)) == kept_nbytes(around)


def test_a_mixed_program_knows_its_parameters():
    mixed = autocast(small, BF16, params=0)
    assert keep_less(mixed) is keep_less(mixed)
    assert keep_less(residuals=0.5)(mixed) == keep_less(mixed, residuals=0.5) != keep_less(mixed)
    with pytest.raises(ValueError, match=r"keep_less\(autocast\(fn, params=...\)\)"):
        keep_less(mixed, params=0)


def test_a_function_that_keeps_less_is_autocast_as_any_other():
    f = autocast(keep_less(small), jnp.float16)
    loss, expected = (jax.jit(g)(WEIGHTS, X) for g in (f, autocast(small, jnp.float16)))
    assert relative_error(loss, expected) < 1e-3
    assert "dot_general" in str(trace(jax.grad(f), WEIGHTS, X))


def test_identity_of_the_wrapper():
    assert keep_less(small) is keep_less(small)
    assert keep_less(small) == keep_less(residuals="auto")(small) != keep_less(small, residuals=0.5)
    assert keep_less(small).__wrapped__ is small
    assert keep_less(small, residuals="declared")(WEIGHTS, X) == small(WEIGHTS, X)
    assert repr(keep_less(small)) == "keep_less(small, residuals='auto')"


def test_layers_of_a_flax_nnx_model():
    def gradient(**options):
        net = nnx.clone(nnx_models.scanned())
        loss = keep_less(nnx_models.bf16(nnx_models.loss_fn), **options)
        grads = nnx.jit(nnx.grad(loss))(net, nnx_models.X)
        assert net.total[...] != 0
        return jax.tree.leaves(grads)

    for a, b in zip(gradient(), gradient(residuals="declared"), strict=True):
        assert a.dtype == jnp.float32
        assert relative_error(a, b) < 5e-3  # one rounding of bfloat16
