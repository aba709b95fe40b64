"""Wrong uses of `autocast` and of the scopes."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Primitive

from jmp_autocast import (
    BF16,
    autocast,
    cast_params,
    compute_precision,
    finalise,
    keep_less,
    quantize_params,
)
from jmp_autocast.integrations import linen
from jmp_autocast.integrations.nnx import autocast as nnx_autocast

from .row import Row, X, loss, loss_at_call, rows

unheard_of = Primitive("bad_input_unheard_of")
unheard_of.def_abstract_eval(lambda x: x)

HALVES = "must be float16 or bfloat16"
OUTPUTS = "must be 'same', 'computed', float32, float16 or bfloat16"
SHARES = "'recompute', 'auto' or a share from 0 to 1"
PARAMS = "must be the position of an argument, several positions, or a predicate"
STRING = "'params=float32,compute=bfloat16,output=float32'"


async def coroutine(x):
    return x


async def asynchronous_generator(x):
    yield x


def generator(x):
    yield x


class LazyCall:
    def __call__(self, x):
        yield x


class Unhashable:
    def __eq__(self, other):
        return True

    def __call__(self, path):
        return True


def _rule_that_returns(value):
    return autocast(jnp.exp, policy=BF16.with_rules({"exp": lambda eqn: value}))


def _fn(mistake, fn, value, rule="takes a callable", fix="Write fn = autocast|@autocast"):
    return Row("autocast", mistake, lambda w: autocast(fn), TypeError, "autocast", value, rule, fix)


def _option(mistake, error, value, rule, fix, **option):
    (name,) = option
    call = lambda w: autocast(loss, **option)
    return Row("autocast", mistake, call, error, name, value, rule, fix)


LINE = "fn = autocast(fn, jnp.bfloat16)"


def _dtype(mistake, value, dtype):
    call, parts = lambda w: autocast(loss, dtype), ("compute_dtype", value, HALVES, "enabled=False")
    return Row("autocast", mistake, call, ValueError, *parts)


CALL = "autocast(fn)(params, x)"
# Options of earlier versions, and what is written now.
OLD = {
    "compute_dtype": "Write policy=jnp.bfloat16",
    "level": "Write policy=Policy(jnp.bfloat16, level=",
    "residuals": "Write keep_less(autocast(fn), residuals=",
    "keep_scopes": "Write keep_less(autocast(fn), keep_scopes=",
    "on_unknown": "explain",
    "compiler_options": "jax.jit(autocast(fn), compiler_options=",
}


def _form(mistake, call, rule, fix=LINE):
    parts = ["autocast", "policy|jnp|Wrap|function", re.escape(rule), re.escape(fix)]
    return Row("autocast", f"form: {mistake}", lambda w: call(), TypeError, *parts)


RETURNS = "takes a function that returns its result"
INNER = "Apply autocast to the function that it calls"

TYPE_ERRORS = {
    "autocast: a predicate of two arguments": (
        lambda w: autocast(loss, params=lambda module, name: True),
        r"params | <lambda>\(module, name\) | must take one argument | the path of an array",
    ),
    "autocast: a predicate without a hash": (
        lambda w: autocast(loss, params=Unhashable()),
        "params | Unhashable object | must be hashable | define __hash__",
    ),
    "autocast: a value decorated": (
        lambda w: autocast(policy="bfloat16")(3),
        r"autocast | got 3 of type int | takes a callable | @autocast\(policy",
    ),
    "autocast: a traced array for a dtype": (
        lambda w: jax.jit(lambda x: autocast(loss, x)(x, x))(jnp.float16(1)),
        r"policy | float16 | a compute dtype such as jnp.bfloat16 | autocast\(fn\)\(params, x\)",
    ),
    "finalise: a function": (
        lambda w: finalise(jnp.sin),
        "finalise | of type .* | takes a jaxpr | make_jaxpr",
    ),
    "keep_less: no share": (
        lambda w: keep_less(loss, residuals=None),
        "residuals | None of type | a word or a share | auto",
    ),
    "keep_less: one scope": (
        lambda w: keep_less(loss, keep_scopes="head"),
        r"keep_scopes | 'head' of | a sequence | \('\*/head'",
    ),
    "keep_less: an array for the function": (
        lambda w: keep_less(X),
        "keep_less | of type ndarray | takes a callable | @keep_less",
    ),
    "autocast: a traced switch": (
        lambda w: jax.jit(lambda on, x: autocast(loss, enabled=on)(w.params, x))(True, X),
        "enabled | traced value | must be known when the program is traced | static argument",
    ),
    "autocast: a rule that returns a name": (
        lambda w: _rule_that_returns("FP32")(X),
        "rule for primitive 'exp' | returned 'FP32' of type str | must return | a CastPolicy",
    ),
    "quantize_params: the parameters first": (
        lambda w: quantize_params(w.params, loss, X),
        "quantize_params | of type dict | takes a callable | function itself, then its arguments",
    ),
}
VALUE_ERRORS = {
    "autocast: out of range": (
        lambda w: autocast(loss, params=2),
        "params=2 | out of range | loss takes 2 positional arguments | numbered from 0",
    ),
    "finalise: an unknown platform": (
        lambda w: finalise(jax.make_jaxpr(jnp.sin)(1.0), platform="xpu"),
        "platform | 'xpu' | must be 'cpu', 'gpu' or 'tpu' | Leave it out",
    ),
    "keep_less: scopes of nothing": (
        lambda w: keep_less(loss, residuals="declared", keep_scopes=["head"]),
        "keep_scopes | 'head' | nothing is computed again | leave keep_scopes out",
    ),
    "keep_less: parameters of what knows its own": (
        lambda w: keep_less(autocast(jnp.matmul), params=0),
        r"keep_less | params= | autocast has wrapped | keep_less\(autocast\(fn, params=...\)\)",
    ),
    "keep_less: a share as a percentage": (
        lambda w: keep_less(loss, residuals=50),
        "residuals | =50 | from 0 | to 1",
    ),
    "autocast: parameters by keyword": (
        lambda w: autocast(loss_at_call, params=0)(params=w.params, x=X),
        "params=0 | 0 positional arguments in this call of loss_at_call | out of range | "
        "Pass the parameters by position, or give params a predicate",
    ),
    "autocast: a keyword that is numbered": (
        lambda w: autocast(lambda p, *, x: x, params=1),
        "params=1 | out of range | takes 1 positional argument | numbered from 0",
    ),
    "cast_params: two policies": (
        lambda w: cast_params(autocast(loss_at_call), w.params, X, policy=BF16),
        "cast_params | policy= | has already wrapped with its own | Leave policy out",
    ),
}

ROWS = [
    *rows(TypeError, TYPE_ERRORS),
    *rows(ValueError, VALUE_ERRORS),
    _fn("an array for the function", X, "float32.*of type ndarray", fix="Pass the function itself"),
    _fn("a coroutine function", coroutine, "coroutine returns a coroutine", RETURNS, INNER),
    _fn("a generator function", generator, "generator returns a generator", RETURNS, INNER),
    _fn("an object whose call is a generator", LazyCall(), "LazyCall returns", RETURNS, INNER),
    _form("a misspelled option", lambda: autocast(loss, parms=0), "'parms'", "mean 'params'"),
    _form("an unheard option", lambda: autocast(loss, zzzz=0), "'zzzz'", "options are policy"),
    _form("an NNX class", lambda: autocast(nnx.Linear), "Linear is a class", "function that calls"),
    _form("NNX: PyTorch's name", lambda: nnx_autocast(loss, dtype="bf16"), "no option 'dtype'"),
    _form("Linen: three", lambda: linen.autocast(nn.Dense, "bf16", 1), "by position", CALL),
    _form("three", lambda: autocast(loss, BF16, X), "got float32[", CALL),
    *(
        _form(f"the old {name}", lambda n=name: autocast(loss, **{n: None}), f"{name!r}", new)
        for name, new in OLD.items()
    ),
    _dtype("int8", "int8", jnp.int8),
    _option("no policy", TypeError, "3 of type int", r"jmp_autocast\.Policy", STRING, policy=3),
    _option("a word", ValueError, "'whatever'", OUTPUTS, "'computed'", output_dtype="whatever"),
    _option("a word", TypeError, "'no'", "must be a bool", "bool", enabled="no"),
    _option("a name", TypeError, "'w'", PARAMS, "lambda path: path.startswith", params="w"),
    *(
        Row(
            "compute_precision",
            mistake,
            lambda w, value=value: compute_precision(value),
            ValueError,
            f"compute_precision | got {found} | takes float32, float16 | bfloat16",
        )
        for mistake, value, found in (
            ("float64", "float64", "float64"),
            ("no name", "bf17", "'bf17'"),
        )
    ),
]
