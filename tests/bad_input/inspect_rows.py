"""Wrong uses of `check_numerics`, `compare`, `explain` and `op_stats`."""

import jax
import jax.numpy as jnp

from jmp_autocast import (
    BF16,
    audit,
    autocast,
    check_numerics,
    compare,
    explain,
    explain_kept,
    op_stats,
    significant_digits,
)

from .row import Row, X, loss, loss_at_call


def generator(x):
    yield x


def _each(tools, mistake, call, error, parts):
    for tool in tools:
        name = tool.__name__
        yield Row(name, mistake, lambda w, tool=tool: call(w, tool), error, parts.format(name))


ROWS = [
    *_each(
        (explain, op_stats, compare, check_numerics),
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
    Row(
        "explain",
        "a policy for a report",
        lambda w: explain(jnp.sin, X).diff(BF16),
        TypeError,
        r"Report\.diff | of type Policy | takes a Report | Make one with explain",
    ),
    Row(
        "explain",
        "reports of two programs",
        lambda w: explain(jnp.sin, X).diff(explain(jnp.cos, X)),
        ValueError,
        r"Report\.diff | sin and cos | one program | Explain the same function",
    ),
    *(
        Row(
            name,
            "no function",
            lambda w, tool=tool: tool(X),
            TypeError,
            rf"{name} | got float32\[2,2\] | of type ndarray | Pass the function itself",
        )
        for name, tool in (("audit", audit), ("explain_kept", explain_kept))
    ),
    Row(
        "compare",
        "a shape for an array",
        lambda w: compare(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32)),
        TypeError,
        "compare | ShapeDtypeStruct | needs arrays | Pass arrays",
    ),
    Row(
        "compare",
        "a name that no value has",
        lambda w: compare(jnp.sin, X, against={"output": X}),
        ValueError,
        "against= | 'output' | no value of sin has that name | Did you mean 'output 0'",
    ),
    Row(
        "compare",
        "an array of another shape",
        lambda w: compare(jnp.sin, X, against={"output 0": X[0]}),
        ValueError,
        r"against\['output 0'\] | shape \(2,\) | the value has \(2, 2\) | Pass it in the value's",
    ),
    Row(
        "compare",
        "integers to compare with",
        lambda w: compare(jnp.sin, X, against={"output 0": [1, 2]}),
        TypeError,
        r"against\['output 0'\] | \[1, 2\] of type list | an array of floats | Pass a NumPy array",
    ),
    Row(
        "significant_digits",
        "one sample",
        lambda w: significant_digits(jnp.sin, X, samples=1),
        ValueError,
        "samples | got 1 | must be at least 2 | Write samples=8",
    ),
    Row(
        "significant_digits",
        "half a sample",
        lambda w: significant_digits(jnp.sin, X, samples=2.5),
        TypeError,
        "samples | 2.5 of type float | must be an integer | Write one, such as 8",
    ),
    Row(
        "significant_digits",
        "a result of integers",
        lambda w: significant_digits(jnp.argsort, X),
        TypeError,
        r"significant_digits | int32\[2,2\] | measures floats | Return a float",
    ),
    Row(
        "significant_digits",
        "a shape for an array",
        lambda w: significant_digits(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32)),
        TypeError,
        "significant_digits | ShapeDtypeStruct | needs arrays | Pass arrays",
    ),
    Row(
        "compare",
        "argnums out of range",
        lambda w: compare(jnp.sum, X, argnums=1),
        ValueError,
        "argnums=1 | has 1 | positional arguments | numbered from 0",
    ),
    Row(
        "compare",
        "gradients of an array",
        lambda w: compare(jnp.sin, X, argnums=0),
        TypeError,
        "argnums | sin | scalar float | pass a loss",
    ),
    Row(
        "check_numerics",
        "a mode that is none",
        lambda w: check_numerics(loss, mode="colect"),
        ValueError,
        (
            "mode | 'colect' | must be one of 'raise', 'collect', 'overflow' | "
            "Did you mean 'collect'"
        ),
    ),
    Row(
        "check_numerics",
        "differentiated from outside",
        lambda w: jax.grad(check_numerics(loss))(w.params, X),
        TypeError,
        (
            r"check_numerics\(loss\) | is differentiated | without its derivative rules | "
            r"check_numerics\(jax.grad\(loss\)\)"
        ),
    ),
    Row(
        "check_numerics",
        "what it closes over is differentiated",
        lambda w: jax.grad(lambda p: check_numerics(lambda x: loss(p, x))(X))(w.params),
        TypeError,
        (
            "check_numerics | is differentiated | without its derivative rules | "
            r"check_numerics\(jax.grad\("
        ),
    ),
]
