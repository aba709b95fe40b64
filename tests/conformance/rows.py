"""The rows of ``torch_cuda.json``: PyTorch's ops under CUDA autocast, and their JAX programs.

Each row of the data holds a call of PyTorch, the JAX expression that a user would write for it,
and the dtype that PyTorch returns for each choice of input dtypes.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import image, lax, nn
from jax.scipy import linalg, special

_DATA = pathlib.Path(__file__).with_name("torch_cuda.json")

# Which float inputs are 16 bits wide.
CASES = {
    "all_f32": "no input in 16 bits",
    "all_bf16": "all inputs in 16 bits",
    "first_f32_rest_bf16": "all but the first in 16 bits",
    "first_bf16_rest_f32": "the first in 16 bits",
    "all_f64": "float64",
}

# The inputs that PyTorch's modules hold as weights and biases, by the row's own names. An input
# that is added to a product inside the op is a bias.
_PARAMS = {
    "_convolution.deprecated": "bc",
    "_convolution": "bc",
    "conv1d": "bc",
    "conv1d.padding": "bc",
    "conv2d": "bc",
    "conv2d.padding": "bc",
    "conv3d": "bc",
    "conv3d.padding": "bc",
    "conv_tbc": "bc",
    "conv_transpose1d": "b",
    "conv_transpose2d.input": "b",
    "conv_transpose3d.input": "b",
    "convolution": "bc",
    "prelu": "b",
    "addmm": "a",
    "addmv": "a",
    "addr": "a",
    "addbmm": "a",
    "baddbmm": "a",
    "linear": "bc",
    "rnn_tanh_cell": "cdef",
    "rnn_relu_cell": "cdef",
    "layer_norm": "bc",
    "native_layer_norm": "bc",
    "rms_norm": "b",
    "bilinear": "cd",
    "embedding": "a",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """An op of PyTorch and its JAX program.

    Args:
        op: The op's name; no two rows have the same.
        torch_call: The call that was measured.
        expression: The JAX program over the inputs.
        shapes: The shapes of the float inputs.
        integers: The integer inputs, by name.
        params: The positions of the float inputs that are parameters.
        torch_dtypes: What PyTorch returns for each case: a dtype, or an error that starts with
            "ERR". "bfloat16" stands for the compute dtype.
    """

    op: str
    torch_call: str
    expression: str
    shapes: tuple[tuple[int, ...], ...]
    integers: Mapping[str, Any]
    params: tuple[int, ...]
    torch_dtypes: Mapping[str, str]

    def program(self, dtype: str) -> Callable:
        """Returns the JAX program as a function of the float inputs."""
        code = compile(self.expression, self.op, "eval")
        names = dict(_NAMES, LOW=jnp.dtype(dtype), **self.integers)
        return lambda *xs: eval(code, names | dict(zip("abcdef", xs, strict=False)))


_NAMES = {
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "jnn": nn,
    "jimage": image,
    "jsp": special,
    "jscl": linalg,
    "optax": optax,
}


@functools.cache
def load_rows() -> tuple[Row, ...]:
    """Reads the data."""
    return tuple(map(_row, json.loads(_DATA.read_text(encoding="utf-8"))["rows"]))


def _row(data: dict) -> Row:
    return Row(
        op=data["op"],
        torch_call=data["torch_call"],
        expression=data["jax_expr"],
        shapes=tuple(map(tuple, data["float_arg_shapes"])),
        integers={name: _integers(*how) for name, how in data["int_args"].items()},
        params=tuple("abcdef".index(name) for name in _PARAMS.get(data["op"], "")),
        torch_dtypes=data["torch_cuda_out"],
    )


def _integers(kind: str, shape: list[int], bound: int = 8) -> np.ndarray:
    if kind == "ones":
        return np.ones(shape, np.int32)
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % bound
