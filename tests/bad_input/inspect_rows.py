"""Wrong uses of `check_numerics`, `compare`, `explain` and `op_stats`."""

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import (
    BF16,
    audit,
    autocast,
    check_numerics,
    compare,
    explain,
    explain_compiled,
    explain_effects,
    explain_kept,
    op_stats,
    significant_digits,
)
from jmp_autocast.inspect import Device
from jmp_autocast.inspect.compiled.hlo import UnreadableError
from tests.support.hlo_texts import TEXTS, module_of

from .row import Row, X, loss, loss_at_call


def generator(x):
    yield x


def _each(tools, mistake, call, error, parts):
    for tool in tools:
        name = tool.__name__
        yield Row(name, mistake, lambda w, tool=tool: call(w, tool), error, parts.format(name))


def scoped_loss(params, x):
    with jax.named_scope("head"):
        return loss(params, x)


def _effects(mistake, error, parts, fn=scoped_loss, **options):
    def call(w):
        args = () if "batches" in options else (w.params, X)
        return explain_effects(fn, *args, **options)

    return Row("explain_effects", mistake, call, error, parts)


ROWS = [
    _effects(
        "no loss",
        TypeError,
        r"scalar float | float32\[2,2\] | must return | Pass a loss",
        fn=lambda params, x: x @ params["w"],
    ),
    _effects(
        "no float parameters",
        ValueError,
        "argnums=1 | holds none | float parameters | Pass the parameters as an argument",
        fn=lambda x, params: loss({"w": x["w"]}, X),
        batches=[({"w": X}, {"n": np.arange(3)})],
        argnums=1,
    ),
    _effects(
        "parameters that do not count",
        ValueError,
        "argnums=0 | no derivative | depends on | stop_gradient",
        fn=lambda params, x: loss(jax.lax.stop_gradient(params), x),
    ),
    _effects(
        "a position that is none",
        ValueError,
        "argnums=3 | has 2 | positional arguments | numbered from 0",
        argnums=3,
    ),
    _effects(
        "a format that is none",
        ValueError,
        "formats | 'bfloat61' | must | Did you mean 'bfloat16'.*'e5m7'",
        formats=["float16", "bfloat61"],
    ),
    _effects("a word for a bool", TypeError, "relative | 'yes' | must be | Write", relative="yes"),
    _effects(
        "no arrays for an error",
        TypeError,
        r"relative=True | int32\[2,2\] | float arrays | Pass a function",
        fn=lambda params, x: (x @ params["w"]).astype(jnp.int32),
        relative=True,
    ),
    _effects("no format", ValueError, "formats | got none | at least one | Write", formats=[]),
    _effects(
        "a number for a format", TypeError, "formats | 8 of type int | name | Write", formats=8
    ),
    _effects(
        "a scope that is none",
        ValueError,
        r"scopes | '\*/haed' | must match | Did you mean 'head'",
        scopes="*/haed",
    ),
    _effects(
        "a kind that is none",
        ValueError,
        "kinds | 'products' | must be | Did you mean 'product'",
        kinds="products",
    ),
    _effects("runs in words", TypeError, "runs | 'all' | must be a number | Write", runs="all"),
    _effects("negative runs", ValueError, "runs | -1 | must not be negative | Write", runs=-1),
    _effects(
        "an array for batches", TypeError, "batches | str | must be an iter | Write", batches="x"
    ),
    _effects("no batch", ValueError, "batches | got none | at least one | Write", batches=[]),
    _effects(
        "a batch without a tuple",
        TypeError,
        r"batches\[0\] | float32\[2,2\] | must be a tuple | Write",
        batches=[X],
    ),
    _effects(
        "batches of two shapes",
        ValueError,
        r"batches\[1\] | float32\[1,2\] | the same shapes | Leave out",
        batches=[({"w": X}, X), ({"w": X}, X[:1])],
    ),
    Row(
        "explain_effects",
        "arguments and batches",
        lambda w: explain_effects(loss, w.params, X, batches=[(w.params, X)]),
        ValueError,
        "batches | got 2 | arguments or batches | Write",
    ),
    Row(
        "explain_effects",
        "a shape for an array",
        lambda w: explain_effects(loss, w.params, jax.ShapeDtypeStruct((2, 2), jnp.float32)),
        TypeError,
        "explain_effects | ShapeDtypeStruct | needs arrays | Pass arrays",
    ),
    Row(
        "explain_effects",
        "a wrapper",
        lambda w: explain_effects(autocast(loss_at_call), w.params, X),
        ValueError,
        "explain_effects | autocast\\( | already wrapped | Pass the function",
    ),
    Row(
        "explain_effects",
        "a format that was not asked for",
        lambda w: explain_effects(loss, w.params, X, formats="float16").of("bfloat16"),
        ValueError,
        "format | 'bfloat16' | asked for | formats=",
    ),
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
        "a device that is misspelled",
        lambda w: explain(loss, w.params, X, device="h1000"),
        ValueError,
        "device='h1000' | Did you mean 'h100' | must be a known device | inspect.Device",
    ),
    Row(
        "explain",
        "a part of a device's name",
        lambda w: explain(loss, w.params, X, device=["v5e", "a100-30gb"]),
        ValueError,
        "device='a100-30gb' | Did you mean 'a100 80gb' | Known are GB200, .*, and cpu | rates",
    ),
    Row(
        "explain",
        "a number for a device",
        lambda w: explain(loss, w.params, X, device=100),
        TypeError,
        'device | 100 of type int | the name of a device | Write device="h100"',
    ),
    Row(
        "explain",
        "a device in GB",
        lambda w: explain(loss, w.params, X, device=Device("mine", float32=20e12, memory=900)),
        ValueError,
        "Device.memory | 900 | in a second | Write 900e9 for",
    ),
    Row(
        "explain",
        "a rate as text",
        lambda w: explain(loss, w.params, X, device=Device("mine", float32="20 T", memory=1e12)),
        TypeError,
        "Device.float32 | '20 T' | is a number | Write 900e9",
    ),
    Row(
        "explain",
        "a device without memory",
        lambda w: explain(loss, w.params, X, device=Device("mine", float32=20e12)),
        ValueError,
        "Device | 'mine' | needs float32= and memory= | as Device",
    ),
    Row(
        "explain",
        "a launch in microseconds",
        lambda w: Device("mine", float32=20e12, memory=1e12, launch=2),
        ValueError,
        "Device.launch | 2 | is seconds | Write 2e-6",
    ),
    Row(
        "explain",
        "float32 in a dtype without a rate",
        lambda w: Device("mine", float32=20e12, memory=1e12, multiplies="tf32"),
        ValueError,
        "Device.multiplies | 'tf32' | have a rate | Give tf32=",
    ),
    Row(
        "explain",
        "rates without a name",
        lambda w: Device(20e12),
        TypeError,
        'Device | 2.*of type float | takes a name | Write Device\\("mine"',
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
        "explain_compiled",
        "an array for the function",
        lambda w: explain_compiled(X),
        TypeError,
        "explain_compiled | of type ndarray | takes a callable | Pass the function itself",
    ),
    Row(
        "explain_compiled",
        "arguments for a text",
        lambda w: explain_compiled(module_of("ROOT %x = f32[] parameter(0)"), X),
        TypeError,
        "arguments | HloModule | for a function alone | leave them out",
    ),
    Row(
        "explain_compiled",
        "a path for a text",
        lambda w: explain_compiled(TEXTS / "gpu_cublas.txt"),
        TypeError,
        r"explain_compiled | gpu_cublas.txt | takes a callable | path.read_text\(\)",
    ),
    Row(
        "explain_compiled",
        "a policy to compare with",
        lambda w: explain_compiled(jnp.sin, X, against=BF16),
        TypeError,
        r"explain_compiled\(against=\) | of type Policy | takes a callable | Pass the function",
    ),
    Row(
        "explain_compiled",
        "text that is no HLO",
        lambda w: explain_compiled("once upon\na time"),
        UnreadableError,
        "text | once upon a time | no HLO module | compiled.as_text",
    ),
    Row(
        "explain_compiled",
        "StableHLO",
        lambda w: explain_compiled(jax.jit(jnp.sin).lower(X).as_text()),
        UnreadableError,
        "text | StableHLO | not what that made | Pass the Lowered itself",
    ),
    Row(
        "explain_compiled",
        "the name of a file for its text",
        lambda w: explain_compiled("dump/module_0042.txt"),
        UnreadableError,
        r"text | dump/module_0042.txt | no HLO module | path.read_text\(\)",
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
