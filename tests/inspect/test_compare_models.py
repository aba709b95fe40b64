"""`compare` on what models are made of: gradients, scopes, and two different programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jmp_autocast import BF16, FP16, autocast, compare

W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32) / 3
X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
P = {"w": W, "b": np.ones(8, np.float32) / 7, "g": np.ones(8, np.float32) / 3}


def moved(p, x):
    """A bias; a weight that is reshaped, transposed, sliced, repeated, cast."""
    h = jnp.tanh(x @ p["w"].reshape(8, 2, 4).reshape(8, 8) + p["b"])
    h = jnp.tanh(h @ p["w"].T) @ jnp.concatenate([p["w"], p["w"]], axis=1)
    h = h[:, :4] @ p["w"][:4] @ p["w"].astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.mean(h**2)


def masked(p, x):
    """An embedding, one-hot rows, a mask, constants, zeros, a norm with scale and offset."""
    h = p["w"][jnp.array([1, 2, 3, 1])] + jax.nn.one_hot(jnp.arange(4), 8) @ p["w"] + X
    h = (h - h.mean(-1, keepdims=True)) * p["g"] + p["b"] + jnp.zeros((4, 8))
    scores = jnp.where(jnp.tril(jnp.ones((4, 8))) > 0, h @ p["w"], -1e9)
    return jnp.mean(jax.nn.softmax(scores) @ p["w"] * np.full((4, 8), 0.1, np.float32))


def in_scan(p, x):
    layers = jnp.stack([p["w"]] * 3)
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w + p["b"]), None), x, layers)[0] ** 2)


@pytest.mark.parametrize(("fn", "policy"), [(moved, FP16), (masked, BF16), (in_scan, BF16)])
def test_gradients_of_what_models_hold(fn, policy):
    comparison = compare(fn, P, X, policy=policy, argnums=0)
    # One product of 16-bit numbers errs by 2**-8 or 2**-11; a program has about ten in a row.
    bound = 10 * (2**-8 if policy is BF16 else 2**-11)
    errors = {path: each.error for path, each in comparison.gradients.items()}
    assert set(errors) == {"0/b", "0/g", "0/w"}
    assert max(errors.values()) < bound
    assert errors["0/w"] > 0
    assert comparison.cotangents


def head(p, x):
    with jax.named_scope("body"):
        h = checkpoint_name(jnp.tanh(x @ p["w"]), "hidden")
    with jax.named_scope("<script>offset"):
        h = (h + jnp.float32(100)) - jnp.float32(100)
    with jax.named_scope("logits"), jax.named_scope("last"):
        return jax.nn.log_softmax(h @ p["w"])


def test_errors_by_scope():
    def loss(p, x):
        return -jnp.mean(head(p, x)[:, 0])

    comparison = compare(loss, P, X, compute_dtype="bfloat16", level="compute", argnums=0)
    found = {each.scope: each for each in comparison.by_scope()}
    offset = found["<script>offset"]
    assert list(found)[:3] == ["body", "<script>offset", "logits/last"]
    assert found["body"].introduced < 0.02 < 0.1 < offset.introduced
    assert found["logits/last"].cotangents > 3
    assert offset.cotangent_error > 0
    assert comparison.by_scope(depth=1)[2].scope == "logits"
    assert "by scope" in str(comparison)
    assert max(map(len, str(comparison).splitlines())) <= 100


def test_a_cotangent_that_cancels_does_not_hide_those_that_count():
    """A number added to all scores has the cotangent 0: both programs have noise in its place."""

    def loss(p, x):
        with jax.named_scope("attention"):
            scores = x @ p["w"]
            shifted = scores - jnp.tanh(jnp.mean(scores, axis=-1, keepdims=True))
            return jnp.mean(jax.nn.softmax(shifted) @ p["w"] ** 2)

    comparison = compare(loss, P, X, policy=BF16, argnums=0)
    (attention,) = comparison.by_scope()
    assert max(row.error for row in comparison.cotangents) > 0.2
    assert attention.cotangent_error < 0.05


def test_a_value_that_training_does_not_differentiate_has_no_cotangent():
    """Equinox refuses operands that are differentiable where its function has no rule for them."""

    @eqx.filter_custom_vjp
    def scaled(y, by):
        return y * by

    scaled.def_fwd(lambda perturbed, y, by: (y * by, None))
    scaled.def_bwd(lambda residuals, g, perturbed, y, by: g * by)

    def loss(p, x):
        hidden = jnp.tanh(jnp.sin(x) @ p["w"])
        fixed = jax.lax.stop_gradient(hidden * 2.0)
        return jnp.mean(scaled(hidden, jnp.exp(x)[:, :1]) * fixed)

    comparison = compare(loss, P, X, policy=BF16, argnums=0)
    differentiated = [row.primitive for row in comparison.cotangents]
    assert {"sin", "exp", "stop_gradient"} & set(differentiated) == set()
    assert "tanh" in differentiated
    assert comparison.gradients["0/w"].error < 0.02


AGAINST = {
    "bfloat16": (autocast(head, compute_dtype=jnp.bfloat16), 1e-3, 0.5),
    "the same": (lambda p, x: head(p, x), 0.0, 0.0),
    "half of the batch at a time": (
        lambda p, x: jnp.concatenate([jax.jit(head)(p, x[:2]), head(p, x[2:])]),
        0.0,
        1e-5,
    ),
}


@pytest.mark.parametrize("name", AGAINST)
def test_two_programs_are_compared_by_name(name):
    other, low, high = AGAINST[name]
    found = compare(head, P, X, against=other)
    assert low <= found.outputs["0"].difference <= high
    names = [each.name for each in found.values]
    expected = ["body", "hidden", "<script>offset", "logits", "logits/last"]
    # The halves have other shapes than the whole, and are named as what is not compared.
    assert (names or list(found.unmatched)) == expected
    assert found.summary.startswith("head against")
    assert max(map(len, str(found).splitlines())) <= 100


def test_against_takes_no_policy():
    with pytest.raises(ValueError, match=r"as they are.*got policy="):
        compare(head, P, X, against=head, policy=BF16)
    with pytest.raises(TypeError, match="callable"):
        compare(head, P, X, against=P)
