"""The rows of ``torch_cuda.json``: PyTorch's ops under CUDA autocast, and their JAX programs.

Each row of the data holds a call of PyTorch, the JAX expression that a user would write for it,
and the dtype that PyTorch returns for each choice of input dtypes. `UNMEASURED` holds more ops,
whose dtypes follow from the list that PyTorch's documentation has them on.
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
from jax.scipy import linalg, ndimage, special

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
    op: params
    for params, ops in {
        "bc": """_convolution.deprecated, _convolution, convolution, conv1d, conv1d.padding, conv2d,
            conv2d.padding, conv3d, conv3d.padding, conv_tbc, linear, linear (3 dimensions),
            layer_norm, native_layer_norm, group_norm""",
        "b": "conv_transpose1d, conv_transpose2d.input, conv_transpose3d.input, prelu, rms_norm",
        "a": "addmm, addmv, addr, addbmm, baddbmm, embedding",
        "cdef": "rnn_tanh_cell, rnn_relu_cell",
        "cd": "bilinear",
        "cf": "lstm_cell",
        "be": "gru_cell",
    }.items()
    for op in " ".join(ops.split()).split(", ")
}


def _lstm_cell(x, h, c, w, u, b):
    i, f, g, o = jnp.split(x @ w.T + h @ u.T + b, 4, axis=-1)
    return nn.sigmoid(o) * jnp.tanh(nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g))


def _gru_cell(x, h, w, u, b):
    r, z, n = jnp.split(x @ w.T + b, 3, axis=-1)
    s, y, m = jnp.split(h @ u.T, 3, axis=-1)
    z = nn.sigmoid(z + y)
    return (1 - z) * jnp.tanh(n + nn.sigmoid(r + s) * m) + z * h


def _group_norm(x, scale, bias):
    groups = x.reshape(x.shape[0], 2, -1)
    mean, var = groups.mean(-1, keepdims=True), groups.var(-1, keepdims=True)
    return ((groups - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape) * scale + bias


_M, _V = (8, 8), (8,)
UNMEASURED = {
    "lower_precision_fp": {
        "linear (3 dimensions)": ("a@b.T+c", (2, 8, 8), _M, _V),
        "lstm_cell": ("_lstm_cell(a,b,c,d,e,f)", _M, _M, _M, (32, 8), (32, 8), (32,)),
        "gru_cell": ("_gru_cell(a,b,c,d,e)", _M, _M, (24, 8), (24, 8), (24,)),
    },
    "fp32": {
        "group_norm": ("_group_norm(a,b,c)", _M, _V, _V),
        "renorm": ("a*jnp.minimum(1.0,0.5/jnp.sqrt(jnp.sum(a*a,axis=1,keepdims=True)))", _M),
        "triplet_margin_loss": (
            "jnp.mean(jnn.relu(1+jnp.linalg.norm(a-b)-jnp.linalg.norm(a-c)))",
            *(_M, _M, _M),
        ),
    },
    "promote": {
        "grid_sampler": ("ndimage.map_coordinates(a,[3*b],1)", _V, _V),
        "hstack": ("jnp.hstack([a,b])", _M, _M),
        "multiplied scatter": ("a.at[np.array([1,3])].multiply(b)", _V, (2,)),
    },
    "unlisted": {
        "celu": ("jnn.celu(a)", _V),
        "selu": ("jnn.selu(a)", _V),
        "logaddexp2": ("jnp.logaddexp2(a,a)", _V),
        "xlog1py": ("jsp.xlog1py(a,a)", _V),
        "where zero": ("jnp.where(a>0.5,a,0.0)", _V),
        "affine": ("2*jnp.arctan(-a)+a", _V),
        "scaled": ("a*jnp.exp(a[0])", _V),  # arrays outvote a scalar
    },
}


@dataclasses.dataclass(frozen=True)
class Row:
    """An op of PyTorch, the call that was measured, and its JAX program over the inputs.

    PyTorch returns a dtype for each case, or an error that starts with "ERR"; "bfloat16" stands for
    the compute dtype. An op that is on none of its lists is "unlisted".
    """

    op: str
    torch_call: str
    expression: str
    shapes: tuple[tuple[int, ...], ...]
    integers: Mapping[str, Any]
    params: tuple[int, ...]
    torch_dtypes: Mapping[str, str]
    listed: str

    def program(self, dtype: str) -> Callable:
        """Returns the JAX program as a function of the float inputs."""
        code = compile(self.expression, self.op, "eval")
        names = dict(_NAMES, LOW=jnp.dtype(dtype), **self.integers)
        return lambda *xs: eval(code, names | dict(zip("abcdef", xs, strict=False)))


_NAMES = {
    **{f.__name__: f for f in (_lstm_cell, _gru_cell, _group_norm)},
    "jax": jax,
    "jnp": jnp,
    "np": np,
    "ndimage": ndimage,
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


@functools.cache
def all_rows() -> tuple[Row, ...]:
    """The rows of the data, and those of `UNMEASURED`."""
    return (
        *load_rows(),
        *(
            _unmeasured(op, listed, *row)
            for listed, rows in UNMEASURED.items()
            for op, row in rows.items()
        ),
    )


def _unmeasured(op: str, listed: str, expression: str, *shapes: tuple[int, ...]) -> Row:
    dtypes = {
        "all_f32": "bfloat16" if listed == "lower_precision_fp" else "float32",
        "all_bf16": "float32" if listed == "fp32" else "bfloat16",
        "all_f64": "float64",
    }
    if listed == "promote":
        dtypes |= {"first_f32_rest_bf16": "float32", "first_bf16_rest_f32": "float32"}
    return Row(op, "", expression, shapes, {}, _params(op), dtypes, listed)


def _row(data: dict) -> Row:
    return Row(
        op=data["op"],
        torch_call=data["torch_call"],
        expression=data["jax_expr"],
        shapes=tuple(map(tuple, data["float_arg_shapes"])),
        integers={name: _integers(*how) for name, how in data["int_args"].items()},
        params=_params(data["op"]),
        torch_dtypes=data["torch_cuda_out"],
        listed=data["policy_cuda_list"],
    )


def _params(op: str) -> tuple[int, ...]:
    return tuple("abcdef".index(name) for name in _PARAMS.get(op, ""))


def _integers(kind: str, shape: list[int], bound: int = 8) -> np.ndarray:
    if kind == "ones":
        return np.ones(shape, np.int32)
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % bound
