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

X = np.ones((8, 8), np.float32)
PLAIN = {"mean": X, "top": X}


def params_of(fn, *args, **kwargs):
    """The arguments of which all arrays are parameters; no argument is one in parts."""
    with warnings.catch_warnings(action="error"):
        call = autocast(fn, "bf16").planned(*args, **kwargs).call
    found = collections.defaultdict(set)
    for path, is_param in zip(call.paths, call.is_param, strict=True):
        found[path.split("/")[0]].add(is_param)
    assert all(len(each) == 1 for each in found.values())
    return {root for root, each in found.items() if each == {True}}


def test_a_module_holds_parameters_whatever_consumes_them():
    model = eqx.nn.LayerNorm(8)
    assert params_of(lambda a, b: b(X[0]) * a["mean"], PLAIN, model) == {"1"}


def test_a_lone_array_is_data():
    assert params_of(lambda x, w: jnp.tanh(x @ w) @ w, X, X) == set()


def test_of_several_trees_the_one_with_weights_has_the_parameters():
    fn = lambda carry, p, batch: jnp.tanh(batch["x"] @ p[0] + p[1]) @ p[0] + carry[0]
    assert params_of(fn, (X, X), [X, X[0]], {"x": X}) == {"1"}
    keyword = lambda batch, *, p: batch["x"] @ p["w"]
    assert params_of(keyword, {"x": X}, p={"w": X}) == {"p"}


def test_the_batch_of_a_training_step_is_data():
    """In the gradient of the first layer it is multiplied with a cotangent, as weights are."""
    loss = lambda p, batch: jnp.sum(jnp.tanh(batch["x"] @ p["a"]) @ p["b"] - batch["y"])
    assert params_of(jax.grad(loss), {"a": X, "b": X}, {"x": X, "y": X}) == {"0"}


def test_a_dataclass_of_chex_holds_the_parameters():
    @chex.dataclass
    class Weights:
        w: jax.Array
        b: jax.Array

    weights = Weights(w=X, b=X[0])
    low = autocast(lambda p, x: x @ p.w + p.b, "bf16", output_dtype="computed")
    assert low(weights, X).dtype == jnp.bfloat16
    assert isinstance(autocast(lambda p: p)(weights), Weights)


def test_data_in_front_keeps_its_vote():
    """Taken for a parameter, the batch was rounded to bfloat16 where it met the matmul."""

    def fn(batch, params):
        return batch["x"] @ params["kernel"] + batch["shift"]

    batch = {"x": X, "shift": 1 + X / 1000}
    out = jax.jit(autocast(fn, "bf16"))(batch, {"kernel": X})
    np.testing.assert_allclose(out, 9.001, rtol=1e-6)  # bfloat16 has 9.0


@pytest.mark.parametrize("name", ["bf16", "bfloat16", jnp.bfloat16])
def test_a_dtype_has_one_spelling_everywhere(name):
    assert Policy(name) == BF16
    assert autocast(jnp.sin, name).policy == BF16
    assert autocast(jnp.sin, policy="bf16", output_dtype=name)._options.output_dtype == jnp.bfloat16
    assert BF16.with_rules({"*": name}, scope="a").rules == (("a", "*", jnp.dtype("bfloat16")),)
    with compute_precision(name):
        pass


TREE = {"key": X, "b": X[0]}


def mlp(p, x):
    return jnp.tanh(jnp.tanh(x @ p["key"] + p["b"]) @ p["key"])


def one_layer(p, x):
    return x @ p["key"] + p["b"]


def looped(p, x):
    layers = jnp.stack([p["key"]] * 2)
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0]


def written_out(p, x):
    return jax.jit(jax.checkpoint(lambda w, h: jnp.sin(h) @ w.T))(p["key"], x)


def normalized(p, x):
    w = p["key"] / jnp.linalg.norm(p["key"], axis=0)
    return jnp.tanh(jnp.tanh(x @ w + p["b"]) @ w)


def convolution(p, x):
    kernel = p["key"].reshape(4, 4, 1, 4)
    return jax.lax.conv_general_dilated(
        x[None, :, :, None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def graph(p, x):
    return jnp.sin(x["adjacency"] @ jnp.tanh(x["input"] @ p["key"])) @ p["key"]


@pytest.mark.parametrize(
    "body",
    [mlp, one_layer, looped, written_out, normalized, convolution],
    ids=lambda fn: fn.__name__,
)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_products_consume_as_weights(is_first, body):
    own = lambda p, d: body(p, d["top"])
    fn = own if is_first else lambda d, p: own(p, d)
    args = (TREE, PLAIN) if is_first else (PLAIN, TREE)
    assert params_of(fn, *args) == {"0" if is_first else "1"}


def test_the_matrix_of_a_graph_is_data():
    assert params_of(graph, TREE, {"adjacency": X, "input": X}) == {"0"}


def test_a_predicate_that_selects_no_array_warns():
    params, x = {"w": jnp.ones((4, 4))}, jnp.ones((2, 4))
    mixed = autocast(lambda params, x: x @ params["w"], params=lambda path: path == "params/w")
    with pytest.warns(UserWarning, match=r"params= selects no array .* data\. Paths .*'0/w', '1'"):
        mixed(params, x)
