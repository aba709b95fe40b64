"""A small GPT on eight devices: as on one, sharded as without autocast, gradients added in float32.

float16 where a test reads the compiled program: XLA's CPU backend moves bfloat16 as float32.
Programs of `shard_map` are in `test_composition_sharding.py`.
"""

import functools
import importlib
import pathlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast import autocast

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
NAMES = ("data", "model")
QUICK = {"xla_backend_optimization_level": 0}  # half the time to compile


pytestmark = pytest.mark.usefixtures("as_users_run_it")


@functools.cache
def gpt():
    """The loss of the examples' GPT, its parameters and a batch of eight windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        module = importlib.import_module("char_gpt")
    model = module.Gpt(vocabulary=24, layers=1, width=16, heads=4)
    windows = np.random.default_rng(0).integers(0, 24, (8, 17)).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), windows[:, :-1])["params"]
    return lambda p, x: module.make_loss(model)(p, x)[0], jax.device_get(params), windows


def replicated(path, leaf):
    return P()


def fsdp(path, leaf):
    """Split along the first axis that eight divides; vectors are whole."""
    fits = [i for i, size in enumerate(leaf.shape) if size % 8 == 0]
    return P(*(None,) * fits[0], NAMES) if leaf.ndim > 1 and fits else P()


TENSOR_PARALLEL = {
    "query": P(None, "model"),
    "key": P(None, "model"),
    "value": P(None, "model"),
    "out": P("model"),
    "Dense_0": P(None, "model"),
    "Dense_1": P("model"),
}


def tensor_parallel(path, leaf):
    """Heads and hidden features are split; the last layers of a pair sum over the devices."""
    names = [key.key for key in path]
    known = next((TENSOR_PARALLEL[name] for name in names if name in TENSOR_PARALLEL), P())
    if names[-1] == "bias":
        return P(*known[1:])
    return known


LAYOUTS = {"data_parallel": replicated, "fsdp": fsdp, "tensor_parallel": tensor_parallel}


@functools.cache
def placed(layout):
    """Parameters and batch on a mesh of four by two."""
    _, params, windows = gpt()
    mesh = jax.make_mesh((4, 2), NAMES, axis_types=(AxisType.Auto,) * 2)
    put = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))
    params = jax.tree.map_with_path(lambda path, x: put(LAYOUTS[layout](path, x), x), params)
    return params, put(P("data" if layout == "tensor_parallel" else NAMES), windows)


@functools.cache
def compiled(layout, dtype):
    """Shardings are those that the compiler chooses: none are asked for."""
    loss = gpt()[0]
    fn = loss if dtype == "float32" else autocast(loss, dtype)
    return jax.jit(jax.value_and_grad(fn)).lower(*placed(layout)).compile(QUICK)


def reduced(executable):
    """(dtype, shape) of each array that an all-reduce or reduce-scatter of the program adds."""
    lines = re.findall(r"= (.*?) (?:all-reduce|reduce-scatter)\(", executable.as_text())
    return [match for line in lines for match in re.findall(r"(\w+)\[([\d,]*)\]", line)]


def test_data_parallel_gradients_are_added_in_float32():
    """Each gradient, and in 16 bits nothing."""
    found = reduced(compiled("data_parallel", "float16"))
    assert {dtype for dtype, _ in found} == {"f32"}
    shapes = [",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(gpt()[1])]
    assert set(shapes) - {shape for _, shape in found} <= {"16", "24"}


def test_fsdp_gradients_are_added_in_float32():
    assert {dtype for dtype, _ in reduced(compiled("fsdp", "float16"))} == {"f32"}


def test_tensor_parallel_activations_are_added_in_16_bits():
    """As in layers with ``dtype=``; gradients of parameters that are split are float32 here too."""
    found = reduced(compiled("tensor_parallel", "float16"))
    assert {shape for dtype, shape in found if dtype == "f16"} <= {"2,16,16"}
