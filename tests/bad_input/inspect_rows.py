"""Wrong uses of `check_numerics`, `compare`, `explain` and the other tools."""

import pathlib

import jax
import jax.numpy as jnp

from jmp_autocast import (
    BF16,
    autocast,
    check_numerics,
    compare,
    explain,
    explain_compiled,
)
from jmp_autocast.inspect.compiled.hlo import UnreadableError
from tests.support.hlo_texts import module_of

from .row import Row, X, loss, loss_at_call, rows


def generator(x):
    yield x


def _each(tools, mistake, call, error, parts):
    for tool in tools:
        name = tool.__name__
        yield Row(name, mistake, lambda w, tool=tool: call(w, tool), error, parts.format(name))


TYPE_ERRORS = {
    "explain_compiled: arguments for a text": (
        lambda w: explain_compiled(module_of("ROOT %x = f32[] parameter(0)"), X),
        "arguments | HloModule | for a function alone | leave them out",
    ),
    "explain_compiled: a path for a text": (
        lambda w: explain_compiled(pathlib.Path("gpu_cublas.txt")),
        r"explain_compiled | gpu_cublas.txt | takes a callable | path.read_text\(\)",
    ),
    "compare: a shape for an array": (
        lambda w: compare(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32)),
        "compare | ShapeDtypeStruct | needs arrays | Pass arrays",
    ),
    "compare: a dict and a function": (
        lambda w: compare({"a": X}, against=jnp.sin),
        "dict of arrays | of type PjitFunction | another dict as against= | Write compare\\(",
    ),
    "compare: a function and a dict": (
        lambda w: compare(jnp.sin, X, against={"a": X}),
        "compare | of type dict | takes a callable | Pass the second function as against=",
    ),
    "compare: lists for arrays": (
        lambda w: compare({"a": [1.0, 2.0]}, against={"a": X}),
        r"arrays of floats | 'a' | \[1.0, 2.0\] of type list | Write compare\(",
    ),
    "compare: gradients of an array": (
        lambda w: compare(jnp.sin, X, argnums=0),
        "argnums | sin | scalar float | pass a loss",
    ),
    "check_numerics: differentiated from outside": (
        lambda w: jax.grad(check_numerics(loss))(w.params, X),
        r"check_numerics\(loss\) | is differentiated | without its derivative rules | "
        r"check_numerics\(jax.grad\(loss\)\)",
    ),
}
VALUE_ERRORS = {
    "compare: dicts without a name in common": (
        lambda w: compare({"a": X}, against={"b": X}),
        r"\['a'\] and \['b'\] | no name | both dicts | the same key",
    ),
    "compare: argnums out of range": (
        lambda w: compare(jnp.sum, X, argnums=1),
        "argnums=1 | has 1 | positional arguments | numbered from 0",
    ),
    "check_numerics: a mode that is none": (
        lambda w: check_numerics(loss, mode="colect"),
        "mode | 'colect' | must be one of 'raise', 'collect', 'overflow' | Did you mean 'collect'",
    ),
}
UNREADABLE = {
    "explain_compiled: text that is no HLO": (
        lambda w: explain_compiled("once upon\na time"),
        "text | once upon a time | no HLO module | compiled.as_text",
    ),
    "explain_compiled: StableHLO": (
        lambda w: explain_compiled(jax.jit(jnp.sin).lower(X).as_text()),
        "text | StableHLO | no HLO module | Pass the function, its Lowered",
    ),
    "explain_compiled: the name of a file for its text": (
        lambda w: explain_compiled("dump/module_0042.txt"),
        r"text | dump/module_0042.txt | no HLO module | path.read_text\(\)",
    ),
}

ROWS = [
    *rows(TypeError, TYPE_ERRORS),
    *rows(ValueError, VALUE_ERRORS),
    *rows(UnreadableError, UNREADABLE),
    *_each(
        (explain, compare, check_numerics),
        "an array for the function",
        lambda w, tool: tool(X),
        TypeError,
        "{0} | of type ndarray | takes a callable | Pass the function itself",
    ),
    *_each(
        (explain, check_numerics),
        "a generator function",
        lambda w, tool: tool(generator, *(X,) * (tool is explain)),
        TypeError,
        "{0} | generator | returns its result | Apply {0} to the function that it calls",
    ),
    *_each(
        (explain, compare),
        "a policy for a wrapper",
        lambda w, tool: tool(autocast(loss_at_call), w.params, X, policy=BF16),
        ValueError,
        "policy= | already wrapped | with its own | Leave policy out",
    ),
    *_each(
        (explain,),
        "a wrapper that casts nothing",
        lambda w, tool: tool(autocast(loss_at_call, enabled=False), w.params, X),
        ValueError,
        "enabled=False | loss | no plan | enabled=True",
    ),
]
