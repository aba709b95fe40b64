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
from jmp_autocast.interpreters.plan.data import Source

X = np.ones((8, 8), np.float32)
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
    np.testing.assert_allclose(out, 9.001, rtol=1e-6)  # bfloat16 has 9.0


@pytest.mark.parametrize("name", ["bf16", "bfloat16", jnp.bfloat16])
def test_a_dtype_has_one_spelling_everywhere(name):
    assert Policy(name) == BF16
    assert autocast(jnp.sin, compute_dtype=name).policy == BF16
    assert autocast(jnp.sin, policy="bf16", output_dtype=name)._options.output_dtype == jnp.bfloat16
    assert BF16.with_rules({"*": name}, scope="a").rules == (("a", "*", jnp.dtype("bfloat16")),)
    with compute_precision(name):
        pass


TREE = {"key": X, "b": X[0]}


def _of(names, body):
    return eval(f"lambda {', '.join(names)}: body({', '.join(names)})", {"body": body})


def mlp(p, x):
    return jnp.tanh(jnp.tanh(x @ p["key"] + p["b"]) @ p["key"])


def one_layer(p, x):
    return x @ p["key"] + p["b"]


def looped(p, x):
    layers = jnp.stack([p["key"]] * 2)
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0]


def written_out(p, x):
    return jax.jit(jax.checkpoint(lambda w, h: jnp.sin(h) @ w.T))(p["key"], x)


def convolution(p, x):
    kernel = p["key"].reshape(4, 4, 1, 4)
    return jax.lax.conv_general_dilated(
        x[None, :, :, None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def graph(p, x):
    return jnp.sin(x["adjacency"] @ jnp.tanh(x["input"] @ p["key"])) @ p["key"]


@pytest.mark.parametrize(
    "body", [mlp, one_layer, looped, written_out, convolution], ids=lambda fn: fn.__name__
)
@pytest.mark.parametrize(
    ("names", "is_first"),
    [
        (("a", "b"), True), (("a", "b"), False), (("obs", "policy"), False),
        (("policy", "obs"), True), (("batch", "net_state"), False), (("x", "y"), True),
    ],
)  # fmt: skip
def test_what_products_read_as_weights_beats_names(names, is_first, body):
    """The key "key" made data of all weights, and of equal trees the first won."""
    own = lambda p, d: body(p, d["top"])
    fn = _of(names, own if is_first else lambda d, p: own(p, d))
    args = (TREE, PLAIN) if is_first else (PLAIN, TREE)
    with warnings.catch_warnings(action="error"):
        planned = autocast(fn, compute_dtype="bf16").planned(*args)
    params = {p.split("/")[0] for p, s in zip(planned.call.paths, planned.call.sources, strict=True)
              if s is Source.PARAM}  # fmt: skip
    assert params == {"0" if is_first else "1"}


@pytest.mark.parametrize("name", ["batch", "inputs", "graph_data"])
def test_the_matrix_of_a_graph_is_data(name):
    fn = _of(("p", name), graph)
    planned = autocast(fn, compute_dtype="bf16").planned(TREE, {"adjacency": X, "input": X})
    assert [s is Source.PARAM for s in planned.call.sources] == [True, True, False, False]


def test_elements_that_are_multiplied_and_added_are_no_weights():
    fn = lambda a, d: jnp.einsum("ij,ij->", jax.nn.log_softmax(a["top"]), d["mean"])
    with pytest.warns(UserWarning, match="params=0"):
        autocast(fn, compute_dtype="bf16").planned(PLAIN, PLAIN)
