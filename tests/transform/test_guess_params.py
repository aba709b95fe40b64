"""Which arguments are parameters where `params=` is left out; and the short names of dtypes."""

import collections
import warnings

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, Policy, autocast, compute_precision
from jmp_autocast.call.guess_params import guessed_params

X = np.ones((4, 4), np.float32)
LAYER, LETTERS, PLAIN = {"dense": {"kernel": X, "bias": X}}, {"w": X, "b": X}, {"mean": X, "top": X}
State = collections.namedtuple("State", "step params")


def _named(*names):
    return eval(f"lambda {', '.join(names)}: 0")


@pytest.mark.parametrize(
    ("names", "args", "kwargs", "expected"),
    [
        # By the argument's name.
        (("params", "x"), (PLAIN, X), {}, {0}),
        (("batch", "params"), (PLAIN, PLAIN), {}, {1}),
        (("batch", "model_inputs"), (PLAIN, PLAIN), {}, set()),
        (("generator", "batch_stats", "critic"), (PLAIN, PLAIN, PLAIN), {}, {0, 2}),
        (("x", "state_dict"), ((X, X), PLAIN), {}, {1}),
        (("trainable_variables", "non_trainable_variables", "x"), ([X], [X], X), {}, {0}),
        (("x",), (X,), {"params": PLAIN}, {"params"}),
        # By what is in it.
        (("a", "b"), ({"image": X, "label": X}, LAYER), {}, {1}),
        (("a", "b"), (PLAIN, LAYER), {}, {1}),
        (("state", "x"), (State(0, PLAIN), X), {}, {0}),
        (("a", "b"), (PLAIN, LETTERS), {}, {1}),
        (("a", "b"), (LAYER, LETTERS), {}, {0}),
        (("a",), ({"image": X},), {}, set()),
        # By position, with nothing else to go by; a lone array is data.
        (("a", "x"), (PLAIN, X), {}, {0}),
        (("a", "b"), (X, PLAIN), {}, set()),
        (("carry", "a"), ((X, X), X), {}, set()),
        (("a", "b"), ((1, "two"), X), {}, set()),
    ],
    ids=str,
)
def test_evidence_decides_before_position(names, args, kwargs, expected):
    with warnings.catch_warnings(action="error"):
        assert guessed_params(_named(*names), args, kwargs) == expected


def test_a_module_is_the_model():
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    assert guessed_params(lambda a, b: 0, (PLAIN, model), {}) == {1}


def test_a_dataclass_of_chex_holds_the_parameters():
    @chex.dataclass
    class Weights:
        w: jax.Array
        b: jax.Array

    weights = Weights(w=X, b=X[0])
    low = autocast(lambda p, x: x @ p.w + p.b, compute_dtype="bf16", output_dtype="computed")
    assert low(weights, X).dtype == jnp.bfloat16
    assert isinstance(autocast(lambda p: p)(weights), Weights)


def test_a_guess_without_evidence_warns():
    with pytest.warns(UserWarning, match=r"several containers.*params=0"):
        assert guessed_params(lambda a, b: 0, (PLAIN, PLAIN), {}) == {0}


def test_data_in_front_keeps_its_vote():
    """Taken for a parameter, the batch was rounded to bfloat16 where it met the matmul."""

    def fn(batch, params):
        return batch["x"] @ params["kernel"] + batch["shift"]

    batch = {"x": X, "shift": 1 + X / 1000}
    out = jax.jit(autocast(fn, compute_dtype="bf16"))(batch, {"kernel": X})
    np.testing.assert_allclose(out, 5.001, rtol=1e-6)  # bfloat16 has 5.0


@pytest.mark.parametrize("name", ["bf16", "bfloat16", jnp.bfloat16])
def test_a_dtype_has_one_spelling_everywhere(name):
    assert Policy(name) == BF16
    assert autocast(jnp.sin, compute_dtype=name).policy == BF16
    assert autocast(jnp.sin, policy="bf16", output_dtype=name)._options.output_dtype == jnp.bfloat16
    assert BF16.with_scopes({"a": name}).scopes == (("a", jnp.dtype("bfloat16")),)
    with compute_precision(name):
        pass
