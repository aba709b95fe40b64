"""`compare(against={name: array})`: the activations of another framework, here of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jmp_autocast import compare
from tests.support import torch_activations

random = np.random.default_rng(0)
KERNELS = [random.normal(size=(3, 3, a, b)).astype(np.float32) / 5 for a, b in ((3, 8), (8, 8))]
HEAD = random.normal(size=(8, 5)).astype(np.float32)
X = random.normal(size=(2, 6, 6, 3)).astype(np.float32)
PARAMS = {"kernels": KERNELS, "head": HEAD}


def model(params, x):
    for i, kernel in enumerate(params["kernels"]):
        with jax.named_scope("features"), jax.named_scope(f"block_{i}"):
            with jax.named_scope("conv"):
                x = jax.lax.conv_general_dilated(
                    x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            x = jax.nn.relu(x)
    x = checkpoint_name(x.mean((1, 2)), "pooled")
    with jax.named_scope("classifier"):
        return x @ params["head"]


def stored(broken=None):
    """The same model as PyTorch has it: NCHW, and what hooks get, in its names of modules."""
    x, found = X.transpose(0, 3, 1, 2).astype(np.float64), {}
    for i, kernel in enumerate(KERNELS):
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        x = np.einsum("ncijhw,hwco->noij", windows, kernel)
        found[f"features.block_{i}.conv"] = x
        x = np.maximum(x, 0 if broken != i else 0.3)
        found[f"features.block_{i}"] = x
    found["pooled"] = x.mean((2, 3))
    found["output 0"] = found["pooled"] @ HEAD
    return {name: value.astype(np.float32) for name, value in found.items()}


def test_a_model_agrees_with_itself_in_another_framework():
    found = compare(model, PARAMS, X, against=stored())
    names = [
        "features/block_0/conv",
        "features/block_0",
        "features/block_1/conv",
        "features/block_1",
    ]
    assert [each.name for each in found.values] == [*names, "pooled"]
    assert found.transposed == dict.fromkeys(names, (0, 2, 3, 1))
    assert found.first_beyond(1e-5) is None
    assert found.outputs["0"].error < 1e-5
    assert str(found).startswith(
        "no value errs by more than 0.001\ntransposed: features/block_0/conv"
    )
    assert found.summary.startswith("model against 6 stored arrays: values err by ")


@pytest.mark.parametrize("broken", [0, 1])
def test_the_layer_that_is_broken_is_the_first(broken):
    found = compare(model, PARAMS, X, against=stored(broken))
    first = found.first_beyond()
    assert first.name == f"features/block_{broken}"
    assert first.error > 0.01
    # What comes before it is right, and what comes after it is not.
    place = [each.name for each in found.values].index(first.name)
    assert all(each.error < 1e-5 for each in found.values[:place])
    assert all(each.error > 1e-3 for each in found.values[place:])
    assert str(found).startswith(f"first beyond 0.001: features/block_{broken}, which errs by 0.")


def of_torch(weights, x):
    """The model of `torch_activations`, with its weights in its layouts."""
    for i in range(2):
        with jax.named_scope("features"), jax.named_scope(str(i)):
            kernel = jnp.transpose(weights[f"features.{i}.conv.weight"], (2, 3, 1, 0))
            with jax.named_scope("conv"):
                x = jax.lax.conv_general_dilated(
                    x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            with jax.named_scope("norm"):
                mean, square = (
                    x.mean((1, 2, 3), keepdims=True),
                    (x * x).mean((1, 2, 3), keepdims=True),
                )
                x = (x - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5)
            x = jax.nn.relu(x)
    with jax.named_scope("classifier"):
        return x.mean((1, 2)) @ weights["classifier.weight"].T + weights["classifier.bias"]


def test_a_layer_of_a_torch_model_that_is_broken_on_purpose():
    """What PyTorch's own hooks got; the second convolution pads as a circle in the broken one."""
    weights, right, broken = torch_activations.read()
    x = weights.pop("x").transpose(0, 2, 3, 1)
    assert compare(of_torch, weights, x, against=right).first_beyond(1e-4) is None
    found = compare(of_torch, weights, x, against=broken)
    assert found.first_beyond(1e-4).name == "features/1/conv"
    assert found.transposed["features/1/conv"] == (0, 2, 3, 1)


def test_the_last_part_of_a_name_will_do():
    arrays = {"block_1": stored()["features.block_1"], "classifier": stored()["output 0"]}
    found = compare(model, PARAMS, X, against=arrays)
    assert [each.name for each in found.values] == ["features/block_1", "classifier"]
    assert found.first_beyond() is None
    assert found.to_dict()["transposed"] == {"features/block_1": [0, 2, 3, 1]}


def test_values_of_16_bits_are_compared_in_theirs():
    low = {"pooled": jnp.asarray(stored()["pooled"], jnp.bfloat16)}
    (found,) = compare(model, PARAMS, X, against=low).values
    assert found.dtypes == ("float32", "bfloat16")
    assert 1e-4 < found.error < 1e-2


class Tensor:
    """As a tensor with a gradient: it refuses to be an array."""

    def __array__(self, *_, **__):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


WRONG = {
    "nothing": ({}, ValueError, "against= is empty.*Write against={'layer_0': array}"),
    "a slip": (
        {"features.blok_1": X},
        ValueError,
        "names 'features.blok_1', and no value of model.* Did you mean 'features/block_[01]'",
    ),
    "the last part, misspelled": ({"clasifier": X}, ValueError, "Did you mean 'classifier'"),
    "two of them": (
        {"conv": X},
        ValueError,
        "may mean 'features/block_0/conv' or 'features/block_1/conv' of model. Write one",
    ),
    "a shape": (
        {"pooled": X},
        ValueError,
        r"against\['pooled'\] has the shape \(2, 6, 6, 3\), and the value has \(2, 8\). Pass it",
    ),
    "integers": (
        {"pooled": [[1, 2]]},
        TypeError,
        r"against\['pooled'\] must be an array of floats",
    ),
    "a tensor": ({"pooled": Tensor()}, TypeError, r"of type Tensor. Pass .*detach\(\).cpu\(\)"),
    "no name": ({0: X}, TypeError, "Each key of against= must be a name, got 0 of type int"),
}


@pytest.mark.parametrize(("arrays", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_told_before_anything_is_compiled(arrays, error, message):
    with pytest.raises(error, match=message), jax.log_compiles(False):
        compare(model, PARAMS, X, against=arrays)


def test_two_layouts_that_fit_are_none():
    def fn(x):
        with jax.named_scope("cube"):
            return 2 * x

    with pytest.raises(ValueError, match="2 ways lead from one to the other"):
        compare(fn, jnp.ones((2, 3, 2)), against={"cube": np.ones((2, 2, 3))})
