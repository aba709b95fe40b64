"""The first mistakes of people who come from other libraries, or guess.

Many were collected by watching: each of those was once silent, or misdirected.
"""

import pathlib
import tempfile

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jmp_autocast
from jmp_autocast import (
    BF16,
    Float8,
    Policy,
    autocast,
    cast_params,
    dynamic_loss_scaling,
    explain,
    full_precision,
    keep_less,
    scaled_value_and_grad,
    tune,
)
from jmp_autocast.integrations import equinox as for_equinox
from jmp_autocast.integrations.nnx import train_step

from .row import Row, X, rows

LINE = r"fn = autocast\(fn, jnp.bfloat16\)"
NO_CONTEXT = "is a function transform, not a context manager"
NO_SCALE = "No loss scale in this state"
FIRST = r"first argument of scaled_value_and_grad\(loss\)\(opt_state, params, ...\)"
PRIMITIVES = r"with_rules\({'\*': 'float32'}, scope='\*"


def _with(context):
    with context:
        pass


def _asked(name):
    exec(f"from jmp_autocast import {name}")


def _loaded(text):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "policy.toml")
        path.write_text(f"version = 2\ncompute_dtype = 'bfloat16'\n{text}")
        Policy.load(path)


def loss(params, x):
    """A loss of these rows, which wrappers may stay with."""
    return jnp.mean((x @ params["w"]) ** 2)


class KerasPolicy:
    """What `keras.DTypePolicy` is to others; Keras is imported with the backend of a process."""

    name, compute_dtype, variable_dtype = "mixed_bfloat16", "bfloat16", "float32"


KerasAdam = type("Adam", (), {"__module__": "keras.src.optimizers.adam"})


class Inside(nn.Module):
    @nn.compact
    @autocast(policy=jnp.bfloat16)
    def __call__(self, x):
        return nn.Dense(3)(x)


def _plain_state(w):
    return optax.adam(1e-3).init(w.params)


TYPE_ERRORS = {
    "autocast: with a device": (
        lambda w: _with(autocast("cuda")),
        f"autocast | 'cuda' | {NO_CONTEXT} | {LINE}",
    ),
    "autocast: with policy=": (
        lambda w: _with(autocast(policy="bf16")),
        r"autocast | with autocast\(...\) | not a context manager | full_precision\(\):",
    ),
    "autocast: device_type=": (
        lambda w: autocast(loss, device_type="cuda"),
        f"autocast | 'device_type' | JAX knows the device | {LINE}",
    ),
    "autocast: the class Policy": (
        lambda w: autocast(loss, policy=Policy),
        r"policy | Policy'> of type type | must be a jmp_autocast.Policy | Policy\(jnp.bfloat16\)",
    ),
    "autocast: a class of a model": (
        lambda w: autocast(nn.Dense),
        "autocast | Dense is a class | takes a function | linen.autocast",
    ),
    "autocast: a Linen module": (
        lambda w: autocast(nn.Dense(3)),
        r"autocast | got a Dense | variables are not in it",
        r"autocast\(model.apply\)\(variables, x\)",
    ),
    "autocast: above a compact method": (
        lambda w: Inside().init(jax.random.key(0), X),
        "autocast | Inside | would leak from the trace | integrations.linen.autocast",
    ),
    "autocast: state of NNX": (
        lambda w: autocast(w.model)(X),
        r"Counting | changes the state | change would be lost | integrations\.nnx\.autocast",
    ),
    "dynamic_loss_scaling: nothing": (
        lambda w: dynamic_loss_scaling(),
        r"inner | missing | dynamic_loss_scaling\(\) | Write dynamic_loss_scaling\(optax.adam",
    ),
    "dynamic_loss_scaling: an optimizer not called": (
        lambda w: dynamic_loss_scaling(optax.adam),
        r"dynamic_loss_scaling | function adam | wraps an optax | Call it first: adam\(",
    ),
    "tune: a list of tuples for the arguments": (
        lambda w: tune(loss, [(w.params, X)], tolerance=0.1),
        r"tune | a list of tuples | one argument | Write batches=\[\(params, x1\)",
    ),
    "cast_params: no function": (
        lambda w: cast_params(w.params),
        r"cast_params\(\) | missing | 'params' | Write cast_params\(fn, params, \*args\)",
    ),
    "full_precision: a decorator, not called": (
        lambda w: full_precision(loss),
        r"full_precision | takes 0 positional | 1 was given | @full_precision\(\) above",
    ),
    "autocast: a policy of Keras": (
        lambda w: autocast(loss, policy=KerasPolicy()),
        "policy | of type KerasPolicy | must be a jmp_autocast.Policy | policy='mixed_bfloat16'",
    ),
    "dynamic_loss_scaling: an optimizer of Keras": (
        lambda w: dynamic_loss_scaling(KerasAdam()),
        "dynamic_loss_scaling | Adam | wraps an optax | keras.optimizers.LossScaleOptimizer",
    ),
    "autocast: what hk.transform returns": (
        lambda w: autocast(hk.transform(lambda x: x)),
        r"autocast | of type Transformed | takes a callable | autocast\(model.apply\)",
    ),
    "integrations.equinox: gradients and state exchanged": (
        lambda w: for_equinox.apply_gradients(w.tx, w.opt_state, w.grads, w.params),
        r"apply_gradients | a LossScalingState | for the gradients",
        r"\(tx, grads, opt_state, model\)",
    ),
    "scaled_value_and_grad: a model of Equinox": (
        lambda w: scaled_value_and_grad(lambda net: net(X[0])[0])(
            8.0, eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))
        ),
        "scaled_value_and_grad | custom_jvp | differentiates arrays | integrations.equinox",
    ),
    "integrations.nnx: model and optimizer exchanged": (
        lambda w: train_step(loss)(w.model, nnx.Optimizer(w.model, w.tx, wrt=nnx.Param), X),
        r"train_step\(loss\) | a Counting and an Optimizer | optimizer first",
        r"step\(optimizer, model, ...\)",
    ),
    "autocast: an optimizer": (
        lambda w: autocast(w.tx),
        f"autocast | GradientTransformation | Wrap the loss | {LINE}",
    ),
    "Policy: the class of a recipe": (
        lambda w: Policy(matmul=Float8),
        "matmul | Float8'> of type type | must be a Float8 | matmul='float8'",
    ),
    "Policy: a format of float8": (
        lambda w: Policy(matmul=jnp.float8_e4m3fn),
        "matmul | float8_e4m3fn | must be a Float8 | whose weights and activations are e4m3",
    ),
    "explain: an option of autocast": (
        lambda w: explain(lambda p, x: x, w.params, X, output_dtype="computed"),
        r"explain | 'output_dtype' | <lambda> has no such | explain\(autocast\(fn, output_dtype=",
    ),
    "Policy: a function as a key": (
        lambda w: BF16.with_rules({jnp.tanh: "FP32"}),
        "primitive | of type | is given by its name | Write its name, 'tanh'",
    ),
}
VALUE_ERRORS = {
    "autocast: a dtype misspelled": (
        lambda w: autocast(loss, "bflaot16"),
        "policy | 'bflaot16' | must be a compute dtype | mean 'bfloat16'",
    ),
    "autocast: float8 as a dtype": (
        lambda w: autocast(loss, jnp.float8_e4m3fn),
        "compute_dtype | float8_e4m3fn | must be float16 or bfloat16 | policy=jmp_autocast.FP8",
    ),
    "autocast: the word float8": (
        lambda w: autocast(loss, "float8"),
        "policy | got 'float8' | must be a compute dtype | jmp_autocast.FP8",
    ),
    "autocast: a preset in quotes": (
        lambda w: autocast(loss, policy="BF16"),
        "policy | 'BF16' | must be a compute dtype | policy=jmp_autocast.BF16, without quotes",
    ),
    "autocast: a file as a policy": (
        lambda w: autocast(loss, policy="q.toml"),
        r"policy | 'q.toml' | must be a compute dtype | Policy.load\('q.toml'\)",
    ),
    "scaled_value_and_grad: the optimizer": (
        lambda w: scaled_value_and_grad(loss)(w.tx, w.params, X),
        rf"{FIRST} | a GradientTransformation | {NO_SCALE}",
        r"its state, opt_state = tx.init\(params\)",
    ),
    "scaled_value_and_grad: the state last": (
        lambda w: scaled_value_and_grad(loss)(w.params, X, w.opt_state),
        f"{FIRST} | argument 3, a LossScalingState, holds one, and comes first | {NO_SCALE}",
        "dynamic_",
    ),
    "scaled_value_and_grad: a plain optimizer": (
        lambda w: scaled_value_and_grad(loss)(_plain_state(w), w.params, X),
        rf"{FIRST} | a tuple | {NO_SCALE} | wrap it, tx = dynamic_loss_scaling\(optax.adam",
    ),
    "Policy: a function for a primitive": (
        lambda w: BF16.with_rules({"softmax": "FP32"}),
        f"with_rules | 'softmax' is a function and no primitive | explain | {PRIMITIVES}",
    ),
    "Policy: a level of Apex": (
        lambda w: Policy(jnp.bfloat16, level="O2"),
        "level | 'O2' | must be one of | Apex's O2 is 'compute'",
    ),
    "Policy: a short name of float8": (
        lambda w: Policy(matmul="fp8"),
        "matmul | 'fp8' | must be one of | Write matmul='float8'",
    ),
    "keep_less: another library's word": (
        lambda w: keep_less(loss, residuals="remat"),
        "residuals | 'remat' | must be | 'recompute'",
    ),
    "Policy: a dtype of 8 bits in a rule": (
        lambda w: BF16.with_rules({"*": jnp.float8_e4m3fn}),
        r"'\*' | 'float8_e4m3fn' | Unknown rule | Write matmul='float8'",
    ),
}

ROWS = [
    *rows(TypeError, TYPE_ERRORS),
    *rows(ValueError, VALUE_ERRORS),
    *rows(
        UserWarning,
        {
            "Policy: a primitive misspelled in a file": (
                lambda w: _loaded("rules = [['*', 'tahn', 'FP32']]"),
                "The policy has | 'tahn' | no known primitive | mean 'tanh'",
            ),
        },
    ),
    *(
        Row("jmp_autocast", f"{name} as {error.__name__}", call, error, f"{parts} | {instead}")
        for name, instead in (
            ("GradScaler", r"dynamic_loss_scaling\(optimizer\)"),
            ("DynamicLossScale", r"dynamic_loss_scaling\(optimizer\)"),
            ("get_policy", "Policy"),
            ("NumericsReport", "from jmp_autocast.inspect import NumericsReport"),
            ("step_skipped", "from jmp_autocast.loss_scaling import step_skipped"),
        )
        for parts in [f"jmp_autocast | {name} | has no"]
        for call, error in (
            (lambda w, name=name: _asked(name), ImportError),
            (lambda w, name=name: getattr(jmp_autocast, name), AttributeError),
        )
    ),
]
