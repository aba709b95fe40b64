"""Random bits on a GPU: those of every other device, from nothing that two arrays share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast.optimizers import draws, stochastic_rounding

KEY = jax.random.key_data(jax.random.key(7, impl="threefry2x32"))
GPUS = ("cuda", "rocm")


@pytest.fixture(params=GPUS)
def as_on_a_gpu(request, monkeypatch):
    """Runs here what a program for a GPU would run there."""

    def chosen(*operands, **branches):
        return branches[request.param](*operands)

    monkeypatch.setattr(draws.lax, "platform_dependent", chosen)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (4, 3, 64), (2, 0)])
def test_bits_on_a_gpu_are_those_of_other_devices(as_on_a_gpu, shape):
    expected = jax.random.bits(draws.as_key(KEY), shape, jnp.uint16)
    found = draws.bits(KEY, shape)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", [0, 1, 13])
def test_keys_on_a_gpu_are_those_of_other_devices(as_on_a_gpu, count):
    expected = jax.random.key_data(jax.random.split(draws.as_key(KEY), count)) if count else []
    np.testing.assert_array_equal(draws.split(KEY, count), expected)


def test_bits_of_mapped_keys_on_a_gpu_are_those_of_other_devices(as_on_a_gpu):
    keys = jax.random.split(draws.as_key(KEY), 3)
    found = jax.vmap(lambda key: draws.bits(key, (4, 5)))(jax.random.key_data(keys))
    expected = jax.vmap(lambda key: jax.random.bits(key, (4, 5), jnp.uint16))(keys)
    np.testing.assert_array_equal(found, expected)


def lowered(platform):
    """Returns the text of an update of three matrices."""
    tx = stochastic_rounding(optax.sgd(1e-3, momentum=0.9))
    params = [jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)] * 3
    state = jax.eval_shape(tx.init, params)
    exported = jax.export.export(jax.jit(tx.update), platforms=[platform])(params, state, params)
    return exported.mlir_module()


KEYS, NUMBERS = "tensor<3x2xui32>", "tensor<512x64xui64>"


@pytest.mark.parametrize("platform", GPUS)
def test_the_draws_of_an_update_on_a_gpu_share_no_array(platform):
    # An array of keys, and 64-bit numbers of elements that XLA makes of one vector: each made XLA
    # update all matrices in one kernel.
    on_a_gpu, elsewhere = lowered(platform), lowered("tpu")
    assert KEYS in elsewhere
    assert NUMBERS in elsewhere
    assert KEYS not in on_a_gpu
    assert NUMBERS not in on_a_gpu


def test_an_array_that_one_word_cannot_number_gets_the_bits_of_jax():
    jaxpr = jax.make_jaxpr(lambda key: draws.bits(key, (2**16, 2**16)))(KEY)
    assert "random_bits" in str(jaxpr)
    assert "threefry2x32 " not in str(jaxpr)
