"""What a loop over layers keeps of its weights, and what stands between a norm and its product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmp_autocast import BF16, autocast, keep_less
from tests.support.jaxprs import find, trace
from tests.support.numerics import assert_trees_near

from .programs import LAYERS, WEIGHTS, X, normalized, scanned

pytestmark = pytest.mark.usefixtures("jit_caches")

ROWS_X = X[:4]  # fewer rows than the weights have: no activation has the shape of a weight
UP = WEIGHTS["up"].shape
MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
SPLIT = NamedSharding(MESH, PartitionSpec("data"))


def low(x):
    return x.astype(jnp.bfloat16)


def layer_in_16_bits(x, up, down):
    return x + (jnp.tanh(low(x) @ low(up)) @ low(down)).astype(x.dtype)


def by_hand(weights, x):
    """Each layer casts its weights to 16 bits, as one with ``dtype=`` does."""
    return scanned(weights, x, lambda x, w: layer_in_16_bits(x, w["up"], w["down"]))


def with_one_weight(weights, x):
    """All layers cast the same weights."""
    up, down = weights["up"][0], weights["down"][0]
    return scanned(weights, x, lambda x, w: layer_in_16_bits(x, up, down) * w["scale"])


def kept(f):
    """The dtype and shape of each array that is kept for the backward pass."""
    _, pullback = jax.eval_shape(lambda *xs: jax.vjp(f, *xs), WEIGHTS, ROWS_X)
    return [(leaf.dtype, leaf.shape) for leaf in jax.tree.leaves(pullback)]


def kept_nbytes(f):
    return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in kept(f))


@pytest.mark.parametrize("residuals", ["auto", "recompute"])
def test_a_loop_keeps_no_16_bit_copy_of_its_weights(residuals):
    planned = keep_less(by_hand, residuals=residuals)
    assert (jnp.bfloat16, UP) in kept(by_hand)
    assert (jnp.bfloat16, UP) not in kept(planned)
    again, once = (jax.jit(jax.grad(f))(WEIGHTS, ROWS_X) for f in (planned, by_hand))
    assert_trees_near(again, once, 1e-2)


def test_the_casts_of_autocast_are_made_again_too():
    def loss(weights, x):
        return scanned(weights, x, lambda x, w: x + jnp.tanh(x @ w["up"]) @ w["down"])

    copies = {
        residuals: (jnp.bfloat16, UP)
        in kept(keep_less(autocast(loss, policy=BF16), residuals=residuals))
        for residuals in ("declared", "auto")
    }
    assert copies == {"declared": True, "auto": False}


def test_a_weight_of_all_iterations_is_cast_once():
    planned = keep_less(with_one_weight)
    assert (jnp.bfloat16, UP[1:]) in kept(planned)
    assert (jnp.bfloat16, UP) not in kept(planned)
    for segment in find(trace(planned, WEIGHTS, ROWS_X), "remat2", "checkpoint"):
        made = [v.aval.shape for eqn in segment.params["jaxpr"].eqns for v in eqn.outvars]
        assert UP[1:] not in made


SPELLINGS = {
    "a constraint": lambda x, scale: jax.lax.with_sharding_constraint(normalized(x, scale), SPLIT),
    "an einsum": lambda x, scale: jnp.einsum("td,d->td", normalized(x, 1.0), scale),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_what_stands_between_a_norm_and_its_product_keeps_nothing_more(name):
    def keeps(norm):
        def layer(x, w):
            return x + jnp.tanh(norm(x, w["scale"]) @ w["up"]) @ w["down"]

        return kept_nbytes(keep_less(lambda w, x: scanned(w, x, layer)))

    assert keeps(SPELLINGS[name]) == keeps(normalized)


def test_a_constrained_product_is_kept_where_its_constraint_has_put_it():
    def layer(x, w):
        return x + jnp.sin(jax.lax.with_sharding_constraint(x @ w["q"], SPLIT))

    planned = keep_less(lambda w, x: scanned(w, x, layer))
    jaxpr = find(trace(planned, WEIGHTS, ROWS_X), "remat2", "checkpoint")[0].params["jaxpr"]
    (put,), (saved,) = find(jaxpr, "sharding_constraint"), find(jaxpr, "name")
    assert saved.invars == put.outvars
    assert kept(planned).count((ROWS_X.dtype, (LAYERS, *ROWS_X.shape))) == 2  # and the stream
